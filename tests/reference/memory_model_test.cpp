// The memory model agrees with itself: the fingerprint that it updates row by row equals the sum
// over the image that it makes from scratch, on random traffic through every layout; and a byte's
// named owner is the request that wrote it.
#include "reference/memory/memory_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "reference/memory/attention_oracle.h"
#include "reference/memory/page_image.h"
#include "sim/step/worker.h"

namespace lockstep {
namespace {

KVCacheGroupSpec group_of(const char* name, int layers, KVCacheSpec spec) {
  KVCacheGroupSpec group;
  for (int i = 0; i < layers; ++i) group.layer_names.push_back(name + std::to_string(i));
  group.spec = std::move(spec);
  return group;
}

KVCacheSpec rows(DType dtype, std::int64_t heads, std::int64_t head_size) {
  KVCacheSpec spec;
  spec.dtype = dtype;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  return spec;
}

KVCacheSpec fp4_rows() {
  KVCacheSpec spec = rows(DType::uint8, 2, 32);
  spec.kv_quant_mode = KVQuantMode::nvfp4;
  return spec;
}

KVCacheSpec compressed_rows() {
  KVCacheSpec spec = rows(DType::bf16, 1, 16);
  spec.kind = CacheKind::mla;
  spec.tokens_per_state = {4};
  return spec;
}

KVCacheSpec ring_of_keys() {
  KVCacheSpec spec = rows(DType::fp32, 1, 4);
  spec.kind = CacheKind::circular_buffer;
  spec.block_size = 8;
  spec.keys_alone = true;
  return spec;
}

KVCacheConfig plan_of(std::vector<KVCacheGroupSpec> groups, std::int64_t page,
                      std::int64_t blocks) {
  KVCacheConfig plan;
  plan.num_blocks = blocks;
  std::size_t places = 0;
  for (KVCacheGroupSpec& group : groups) {
    places = std::max(places, group.layer_names.size());
    if (groups.size() > 1) group.spec.page_size_padded = page;
  }
  for (std::size_t place = 0; place < places; ++place) {
    KVCacheTensor& tensor = plan.tensors.emplace_back();
    tensor.size_bytes = page * blocks;
    for (const KVCacheGroupSpec& group : groups)
      if (place < group.layer_names.size()) tensor.shared_by.push_back(group.layer_names[place]);
  }
  plan.groups = std::move(groups);
  return plan;
}

struct Setting {
  const char* title;
  KVCacheConfig plan;
  AttentionBackend backend;
  CacheLayout layout;
  Numbers numbers = Numbers::words;
};

std::vector<Setting> settings() {
  const KVCacheSpec bf16 = rows(DType::bf16, 2, 16);
  const KVCacheSpec bytes = rows(DType::fp8_e4m3, 3, 5);  // rows of 5 bytes, pages of 480
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.states = {{{2, 5}, DType::fp32}, {{3, 7}, DType::bf16}};  // 40 and 42 bytes
  return {
      {"K and V apart, 7 blocks", plan_of({group_of("a", 2, bf16)}, 2048, 7),
       AttentionBackend::flash_attn, CacheLayout::NHD},
      {"K and V apart, HND, 8 blocks", plan_of({group_of("a", 1, bf16)}, 2048, 8),
       AttentionBackend::flash_attn, CacheLayout::HND},
      {"in the page", plan_of({group_of("a", 2, bf16)}, 2048, 7), AttentionBackend::triton_attn,
       CacheLayout::NHD},
      {"rows of 5 bytes, K and V apart", plan_of({group_of("a", 2, bytes)}, 480, 7),
       AttentionBackend::flash_attn, CacheLayout::NHD},
      {"compressed rows, a ring and rows",
       plan_of({group_of("a", 1, bf16), group_of("c", 2, compressed_rows()),
                group_of("r", 1, ring_of_keys())},
               2048, 7),
       AttentionBackend::triton_attn, CacheLayout::NHD},
      {"nvfp4 as numbers", plan_of({group_of("a", 2, fp4_rows())}, 1152, 7),
       AttentionBackend::flashinfer, CacheLayout::LBHNC, Numbers::real},
      {"padded pages with states",
       plan_of({group_of("a", 1, bf16), group_of("m", 2, states)}, 2312, 7),
       AttentionBackend::triton_attn, CacheLayout::NHD},
  };
}

// Poisons, zeroes, writes and copies at random, and tracks the content of each slot.
class Traffic {
 public:
  Traffic(MemoryModel& model, std::uint64_t seed) : model_(model), state_(seed) {
    writer_ = model.add_writer("r0");
  }
  std::uint64_t random(std::uint64_t n) { return splitmix64(state_ += 77) % n; }

  void act(std::int64_t step) {
    model_.begin_step(step);
    const BlockId block{static_cast<std::int32_t>(1 + random(model_.num_blocks() - 1))};
    const auto group = static_cast<std::int32_t>(random(model_.num_groups()));
    if (model_.block(block).group != group && model_.block(block).group != -1) {
      model_.poison(block, Unwritten::freed);
      if (random(2) == 0) model_.zero(group, block);
    }
    const BlockId source{static_cast<std::int32_t>(1 + random(model_.num_blocks() - 1))};
    if (source != block && model_.block(source).group == group && random(3) == 0) {
      EXPECT_EQ(model_.copy_block(group, source, block, static_cast<std::int64_t>(random(17))),
                std::nullopt);
      return;
    }
    if (model_.is_state_group(group)) {
      const ContentId content = splitmix64(random(1000));
      const auto wrong = model_.advance_state(group, kNullBlock, block, 0, kEmptyPrefix,
                                              std::vector<ContentId>{content}, writer_);
      EXPECT_EQ(wrong, std::nullopt);
      return;
    }
    for (std::uint64_t n = 1 + random(5); n > 0; --n)
      model_.write_token(group, block, static_cast<std::int64_t>(random(model_.block_size(group))),
                         splitmix64(random(50)), writer_, static_cast<std::int64_t>(random(100)));
  }

 private:
  MemoryModel& model_;
  std::uint64_t state_;
  WriterId writer_ = kNobody;
};

TEST(MemoryModel, FingerprintKeptUpRowByRowIsTheSumOverTheImage) {
  for (const Setting& setting : settings()) {
    auto model = MemoryModel::create(setting.plan, setting.backend, setting.layout,
                                     LayoutRule::isolated, 0, setting.numbers);
    ASSERT_TRUE(model) << setting.title << ": " << model.error().message;
    Traffic traffic(*model, 11);
    for (int step = 0; step < 400; ++step) {
      traffic.act(step);
      for (const ModelPage& page : model->written_pages()) {
        const PageSum kept = model->fingerprint(page);
        ASSERT_EQ(kept, page_sum(model->page_image(page)))
            << setting.title << " step " << step << " page " << page.index;
      }
    }
  }
}

// [K data | K scales | V data | V scales]; 16 tokens of 2 heads are 32 rows of 16 and 2 bytes.
TEST(MemoryModel, RowsOfNvfp4AsNumbersLieInFourAreasAndLeaveNoByteOver) {
  for (const CacheLayout order : {CacheLayout::LBNHC, CacheLayout::LBHNC}) {
    auto model = MemoryModel::create(plan_of({group_of("a", 1, fp4_rows())}, 1152, 3),
                                     AttentionBackend::flashinfer, order, LayoutRule::isolated, 0,
                                     Numbers::real);
    ASSERT_TRUE(model) << model.error().message;
    const WriterId writer = model->add_writer("r0");
    model->write_token(0, BlockId{1}, 5, splitmix64(1), writer, 5);
    const ModelPage page{0, 1};
    std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> bytes;
    for (std::int64_t byte = 0; byte < 1152; ++byte) {
      const ByteOwner owner = model->owner_of(page, byte);
      ASSERT_EQ(owner.what, ByteOwner::What::row) << byte;
      EXPECT_EQ(owner.part, byte / 576);
      EXPECT_EQ(owner.byte_in_row >= 16, byte % 576 >= 512);
      bytes.emplace(owner.part, owner.head, owner.slot_offset, owner.byte_in_row);
    }
    EXPECT_EQ(bytes.size(), 1152u);
    const bool by_token = order == CacheLayout::LBNHC;
    const ByteOwner second = model->owner_of(page, 16), scale = model->owner_of(page, 512 + 2);
    EXPECT_EQ(second.head, by_token ? 1 : 0);
    EXPECT_EQ(second.slot_offset, by_token ? 0 : 1);
    EXPECT_EQ(scale.head, second.head);
    EXPECT_EQ(scale.slot_offset, second.slot_offset);
    EXPECT_EQ(model->fingerprint(page), page_sum(model->page_image(page)));
  }
}

TEST(MemoryModel, RowsOfNvfp4AsNumbersAreRefusedWhereABlockIsNotDense) {
  for (const CacheLayout order : {CacheLayout::LHBNC, CacheLayout::BHLNC}) {
    const auto model = MemoryModel::create(plan_of({group_of("a", 2, fp4_rows())}, 1152, 3),
                                           AttentionBackend::flashinfer, order,
                                           LayoutRule::isolated, 0, Numbers::real);
    ASSERT_FALSE(model);
    EXPECT_NE(model.error().message.find("choose LBNHC, LBHNC, BLNHC or BLHNC"), std::string::npos)
        << model.error().message;
  }
}

TEST(MemoryModel, PagesThatAStepDoesNotListAsWrittenKeepTheirImage) {
  for (const Setting& setting : settings()) {
    auto model = MemoryModel::create(setting.plan, setting.backend, setting.layout,
                                     LayoutRule::isolated, 0, setting.numbers);
    ASSERT_TRUE(model);
    Traffic traffic(*model, 5);
    std::map<ModelPage, std::vector<std::uint8_t>> before;
    const auto all_pages = [&](auto visit) {
      for (std::int32_t t = 0; t < model->num_tensors(); ++t)
        for (std::int32_t p = 0; p < model->num_blocks(); ++p) visit(ModelPage{t, p});
    };
    all_pages([&](ModelPage page) { before[page] = model->page_image(page); });
    for (int step = 0; step < 100; ++step) {
      traffic.act(step);
      const auto written = model->written_pages();
      all_pages([&](ModelPage page) {
        const std::vector<std::uint8_t> now = model->page_image(page);
        if (!std::ranges::binary_search(written, page)) {
          ASSERT_EQ(now, before[page])
              << setting.title << " step " << step << " page " << page.index;
        }
        before[page] = now;
      });
    }
  }
}

TEST(MemoryModel, WritingOneTokenChangesExactlyTheBytesThatAreSaidToBeItsOwn) {
  for (const Setting& setting : settings()) {
    auto model = MemoryModel::create(setting.plan, setting.backend, setting.layout,
                                     LayoutRule::isolated, 0, setting.numbers);
    ASSERT_TRUE(model);
    const WriterId writer = model->add_writer("r0");
    const auto images = [&] {
      std::vector<std::vector<std::uint8_t>> all;
      for (std::int32_t t = 0; t < model->num_tensors(); ++t)
        for (std::int32_t p = 0; p < model->num_blocks(); ++p)
          all.push_back(model->page_image({t, p}));
      return all;
    };
    model->zero(0, BlockId{3});  // every byte of a row of zeros differs from a row of numbers
    const auto before = images();
    model->write_token(0, BlockId{3}, 6, 4711, writer, 0);
    const auto after = images();
    std::int64_t changed = 0;
    for (std::size_t i = 0; i < after.size(); ++i)
      for (std::size_t byte = 0; byte < after[i].size(); ++byte) {
        const ModelPage page{
            static_cast<std::int32_t>(static_cast<std::int64_t>(i) / model->num_blocks()),
            static_cast<std::int32_t>(static_cast<std::int64_t>(i) % model->num_blocks())};
        const ByteOwner owner = model->owner_of(page, static_cast<std::int64_t>(byte));
        const bool own = owner.what == ByteOwner::What::row && owner.block == BlockId{3} &&
                         owner.slot_offset == 6;
        if (before[i][byte] != after[i][byte]) {
          ++changed;
          EXPECT_TRUE(own) << setting.title << " page " << page.index << " byte " << byte;
        }
      }
    std::int64_t row_bytes = 0;
    for (const ModelLayer& layer : model->layers_of(0))
      row_bytes += layer.row_size_bytes * static_cast<std::int64_t>(layer.coords.size());
    EXPECT_GT(changed, row_bytes * 8 / 10) << setting.title;  // a random byte may be zero
    EXPECT_LE(changed, row_bytes) << setting.title;
  }
}

TEST(MemoryModel, ACopiedBlockHasAllBytesAndTheRowsThatCount) {
  for (const Setting& setting : settings()) {
    auto model = MemoryModel::create(setting.plan, setting.backend, setting.layout,
                                     LayoutRule::isolated, 0, setting.numbers);
    ASSERT_TRUE(model) << setting.title << ": " << model.error().message;
    const WriterId writer = model->add_writer("r0");
    const BlockId source{2}, target{4};
    for (int row = 0; row < 9; ++row)
      model->write_token(0, source, row, splitmix64(row), writer, row);
    model->poison(target, Unwritten::freed);
    ASSERT_EQ(model->copy_block(0, source, target, 6), std::nullopt) << setting.title;
    EXPECT_NE(model->slot_content(0, target, 5), nullptr);
    EXPECT_EQ(model->slot_content(0, target, 6), nullptr);
    // Also past the rows that count.
    for (const ModelLayer& layer : model->layers_of(0)) {
      for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
        for (std::int64_t row = 0; row < layer.rows_per_block; ++row)
          for (std::int64_t head = 0; head < layer.num_kv_heads; ++head)
            for (std::int64_t byte = 0; byte < layer.row_size_bytes; ++byte) {
              const std::int64_t from = layer.memory.row_begin(source, kv, row, head) + byte;
              const std::int64_t to = layer.memory.row_begin(target, kv, row, head) + byte;
              const auto is = [&](std::int64_t offset) {
                const auto at = model->place_of(layer, offset);
                return model->page_image(at.page)[static_cast<std::size_t>(at.byte)];
              };
              if (byte != 0 && byte + 1 != layer.row_size_bytes) continue;
              ASSERT_EQ(is(to), is(from)) << setting.title << " row " << row;
            }
    }
    EXPECT_NE(model->copy_block(0, BlockId{5}, BlockId{6}, 0), std::nullopt);  // holds nothing
    EXPECT_NE(model->copy_block(0, source, kNullBlock, 0), std::nullopt);
  }
}

TEST(MemoryModel, ACompressedRowHasTheContentOfItsLastTokenAndIsWrittenWithItAlone) {
  auto model =
      MemoryModel::create(plan_of({group_of("c", 1, compressed_rows())}, 128, 4),
                          AttentionBackend::triton_mla, CacheLayout::NHD, LayoutRule::isolated);
  ASSERT_TRUE(model) << model.error().message;
  const WriterId writer = model->add_writer("r0");
  const BlockId block{2};
  const ModelLayer& layer = model->layers()[0];
  const auto row = [&](std::int64_t index) {
    const std::vector<std::uint8_t> image = model->page_image({0, 2});
    const auto begin = image.begin() + index * layer.row_size_bytes;
    return std::vector<std::uint8_t>(begin, begin + layer.row_size_bytes);
  };
  const std::vector<std::uint8_t> unwritten = row(1);
  for (int token = 4; token < 7; ++token) {
    model->begin_step(token);
    model->write_token(0, block, token, 100 + token, writer, token);
    EXPECT_TRUE(model->written_pages().empty()) << "token " << token;
    EXPECT_EQ(row(1), unwritten) << "token " << token;
  }
  model->begin_step(7);
  model->write_token(0, block, 7, 107, writer, 7);
  std::vector<std::uint8_t> expected(static_cast<std::size_t>(layer.row_size_bytes));
  draw_row(107, layer.coords[0], layer.words, expected);
  EXPECT_EQ(row(1), expected);
  EXPECT_EQ(model->owner_of({0, 2}, layer.row_size_bytes).slot_offset, 7);
  // Read by whole rows: the last token of each, under the row's number.
  PrefixContent prefix;
  for (int token = 0; token < 14; ++token) prefix.append(token);
  const std::uint64_t rows_1_and_2 =
      token_digest(layer, prefix.content(7), 1) + token_digest(layer, prefix.content(11), 2);
  EXPECT_EQ(prefix.attention_digest(layer, 4, 14), rows_1_and_2);
  EXPECT_EQ(prefix.attention_digest(layer, 12, 14), 0u);
}

TEST(MemoryModel, CompressedRowsThatNoPlanCanHaveAreRefusedByName) {
  KVCacheSpec odd = compressed_rows();
  odd.tokens_per_state = {5};
  const auto of_blocks =
      MemoryModel::create(plan_of({group_of("c", 1, odd)}, 96, 4), AttentionBackend::triton_mla,
                          CacheLayout::NHD, LayoutRule::isolated);
  ASSERT_FALSE(of_blocks);
  EXPECT_NE(of_blocks.error().message.find("no whole number of rows of 5 tokens"),
            std::string::npos)
      << of_blocks.error().message;
  KVCacheSpec window = compressed_rows();
  window.kind = CacheKind::sliding_window_mla;
  window.sliding_window = 8;
  const auto of_window =
      MemoryModel::create(plan_of({group_of("w", 1, window)}, 128, 4), AttentionBackend::triton_mla,
                          CacheLayout::NHD, LayoutRule::isolated);
  ASSERT_FALSE(of_window);
  EXPECT_NE(of_window.error().message.find("in a cache of kind sliding_window"), std::string::npos)
      << of_window.error().message;
}

TEST(MemoryModel, AStateReadAtAnotherCountIsRefused) {
  const Setting setting = settings().back();
  auto model =
      MemoryModel::create(setting.plan, setting.backend, setting.layout, LayoutRule::isolated);
  ASSERT_TRUE(model);
  const WriterId writer = model->add_writer("r0");
  PrefixContent prefix;
  for (int token = 0; token < 8; ++token) prefix.append(token);
  const auto contents = prefix.contents();
  EXPECT_EQ(
      model->advance_state(1, kNullBlock, BlockId{2}, 0, kEmptyPrefix, contents.first(4), writer),
      std::nullopt);
  EXPECT_EQ(model->copy_state(1, BlockId{2}, BlockId{4}, BlockId{2}, 0), std::nullopt);
  EXPECT_NE(model->copy_state(1, BlockId{5}, BlockId{6}, BlockId{5}, 0), std::nullopt);
  const auto wrong_count = model->advance_state(1, BlockId{4}, BlockId{4}, 5, prefix.content(4),
                                                contents.subspan(5), writer);
  ASSERT_NE(wrong_count, std::nullopt);
  EXPECT_NE(wrong_count->find("holds r0's after 4 tokens"), std::string::npos) << *wrong_count;
  // In two steps or in one: the state after 8 tokens is the same.
  EXPECT_EQ(model->advance_state(1, BlockId{4}, BlockId{4}, 4, prefix.content(3),
                                 contents.subspan(4), writer),
            std::nullopt);
  EXPECT_EQ(model->advance_state(1, kNullBlock, BlockId{5}, 0, kEmptyPrefix, contents, writer),
            std::nullopt);
  EXPECT_EQ(*model->block(BlockId{4}).state.words, *model->block(BlockId{5}).state.words);
}

// States advance in place, and long chunks in several threads.
TEST(MemoryModel, AnAdvancedStateLeavesItsCopiesAsTheyAreAndIsThatOfOneThread) {
  const Setting setting = settings().back();
  const std::vector<ContentId> contents(800'000, ContentId{7});  // of 22 words: 17 million updates
  std::vector<std::vector<std::uint64_t>> by_threads;
  for (const int num_threads : {1, 3}) {
    auto model =
        MemoryModel::create(setting.plan, setting.backend, setting.layout, LayoutRule::isolated);
    ASSERT_TRUE(model);
    model->use_threads(num_threads);
    const WriterId writer = model->add_writer("r0");
    const auto advance = [&](BlockId source, std::int64_t position) {
      EXPECT_EQ(model->advance_state(1, source, BlockId{2}, position,
                                     position == 0 ? kEmptyPrefix : contents[0], contents, writer),
                std::nullopt);
      return *model->block(BlockId{2}).state.words;
    };
    const auto first = advance(kNullBlock, 0);
    EXPECT_EQ(model->copy_state(1, BlockId{2}, BlockId{4}, BlockId{2}, 0), std::nullopt);
    const auto second = advance(BlockId{2}, std::ssize(contents));
    const auto third = advance(BlockId{2}, 2 * std::ssize(contents));  // nothing shares its words
    EXPECT_EQ(*model->block(BlockId{4}).state.words, first);
    EXPECT_NE(second, first);
    by_threads.push_back(third);
  }
  EXPECT_EQ(by_threads[0], by_threads[1]);
}

TEST(PrefixContent, DependsOnTheTokensBeforeItAndOnNothingElse) {
  PrefixContent a, b;
  for (const int token : {5, 6, 7}) a.append(token);
  for (const int token : {5, 6, 7}) b.append(token);
  EXPECT_EQ(a.content(2), b.content(2));
  b.truncate(1);
  b.append(9);
  b.append(7);
  EXPECT_EQ(a.content(0), b.content(0));
  EXPECT_NE(a.content(2), b.content(2));
}

TEST(PrefixContent, DigestOfARangeIsTheSumOfItsTokensAlsoAfterADraftWasRejected) {
  auto model = MemoryModel::create(settings().front().plan, AttentionBackend::triton_attn,
                                   CacheLayout::NHD, LayoutRule::isolated);
  ASSERT_TRUE(model);
  const ModelLayer& layer = model->layers()[1];
  PrefixContent prefix;
  for (int token = 0; token < 20; ++token) prefix.append(token);
  prefix.attention_digest(layer, 0, 20);
  prefix.truncate(12);
  for (int token = 0; token < 8; ++token) prefix.append(100 + token);
  std::uint64_t sum = 0;
  for (std::int64_t p = 9; p < 17; ++p) sum += token_digest(layer, prefix.content(p), p);
  EXPECT_EQ(prefix.attention_digest(layer, 9, 17), sum);
}

TEST(AttentionOracle, ReadsNumbersAsTheFormatsSay) {
  // One element of every format against its definition: sign, 1.mantissa, exponent.
  for (const DType dtype :
       {DType::bf16, DType::fp16, DType::fp32, DType::fp8_e4m3, DType::fp8_e5m2})
    for (std::int64_t i = 0; i < 64; ++i) {
      const double x = std::abs(row_element(99, i, dtype));
      EXPECT_GE(x, 0.5);
      EXPECT_LT(x, 1.0);
    }
  const std::uint64_t word = row_word(99, 0, word_shape(DType::fp32));
  const auto bits = static_cast<std::uint32_t>(word);
  float expected = 0;
  std::memcpy(&expected, &bits, 4);
  EXPECT_EQ(row_element(99, 0, DType::fp32), static_cast<double>(expected));
}

TEST(AttentionOracle, OnePositionIsItsOwnValue) {
  auto model = MemoryModel::create(settings().front().plan, AttentionBackend::triton_attn,
                                   CacheLayout::NHD, LayoutRule::isolated);
  ASSERT_TRUE(model);
  const ModelLayer& layer = model->layers()[0];
  const std::vector<ContentId> contents{42};
  DecodedRows decoded(1);
  for (std::int32_t kv_head = 0; kv_head < 2; ++kv_head) {
    const auto attended = [&] {
      std::vector<double> output(2 * 16);
      attend(layer, kv_head, contents, 7, 2, decoded, DType::fp32, 1, output);
      return output;
    };
    const std::vector<double> output = attended();
    EXPECT_EQ(output, attended()) << "from the rows it kept";
    for (std::size_t i = 0; i < output.size(); ++i)
      EXPECT_EQ(output[i], row_element(row_key(42, layer.coords[2 + kv_head]),
                                       static_cast<std::int64_t>(i % 16), DType::bf16));
  }
}

}  // namespace
}  // namespace lockstep
