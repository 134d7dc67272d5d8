// Saved cases: everything a replay needs survives the file, and a file is whole or refused.
#include "traces/formats/saved_case.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/output_file.h"
#include "tests/traces/sample_generator.h"
#include "tests/traces/text_files.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

using testing_files::changed;
using testing_files::read_whole;
using testing_files::refusal;
using testing_files::temporary_path;
using testing_files::write_temporary;

// A spec in which no field has its default value, so that one left out of the file shows. A new
// field of KVCacheSpec stops this from compiling: give it a value here and a key in spec_json.cpp.
KVCacheSpec spec_of(CacheKind kind) {
  KVCacheSpec spec;
  auto& [kind_, block_size, num_kv_heads, head_size, dtype, sliding_window, attention_chunk_size,
         sink_len, rswa_window, extra_retained_tokens, bounded_replay, states, mamba_cache_mode,
         num_speculative_blocks, num_prefill_checkpoint_blocks, prefill_checkpoint_alignment,
         page_size_padded, head_size_v, kv_quant_mode, keys_alone, cache_dtype_str, model_version,
         tokens_per_state, alignment, block_stride_alignment, dcp_sharded, page_copy_bytes,
         blocks_per_request, plan] = spec;
  kind_ = kind;
  plan = {};  // no case has it
  block_size = 48;
  if (kind == CacheKind::hisparse_resident || kind == CacheKind::hisparse_hot)
    page_copy_bytes = 4608;
  if (kind == CacheKind::hisparse_hot) blocks_per_request = 5;
  if (kind == CacheKind::mamba) {
    states = {{{3, 8192}, DType::bf16}, {{32, 128, 128}, DType::fp32}};
    mamba_cache_mode = MambaCacheMode::align;
    num_speculative_blocks = 2;
    num_prefill_checkpoint_blocks = 1;
    prefill_checkpoint_alignment = 64;
  } else if (!keeps_pages(spec)) {
    num_kv_heads = 3;
    head_size = 96;
    dtype = DType::fp8_e5m2;
  }
  sliding_window = 128;
  if (is_sliding_window(kind)) extra_retained_tokens = 3;
  bounded_replay = is_mla_window(kind);
  attention_chunk_size = 8192;
  if (kind == CacheKind::sink_full) sink_len = 96;
  if (kind == CacheKind::sink_full || kind == CacheKind::rswa) rswa_window = 96;
  page_size_padded = 1 << 20;
  head_size_v = is_ring(kind) ? 0 : 80;  // keys alone
  kv_quant_mode = KVQuantMode::int8_per_token_head;
  keys_alone = is_ring(kind);
  cache_dtype_str = "fp8_ds_mla";
  model_version = "deepseek_v4";
  tokens_per_state = {4};
  alignment = 576;
  block_stride_alignment = 8448;
  dcp_sharded = false;
  return spec;
}

SavedCase case_with_everything() {
  SavedCase saved;
  saved.name = "a divergence";
  saved.engine.engine = "vllm-0.33.0";
  saved.engine.max_num_seqs = 3;
  saved.engine.policy = SchedulingPolicy::priority;
  saved.engine.async_scheduling = true;
  saved.cache.num_blocks = 9;
  for (const CacheKindTraits& traits : kCacheKinds) {
    const CacheKind kind = traits.kind;
    const std::string layer = fmt::format("layers.{}", saved.cache.groups.size());
    saved.cache.groups.push_back(
        {.layer_names = {layer}, .spec = spec_of(kind), .layer_specs = {}, .layers_per_page = 1});
    saved.cache.tensors.push_back({.size_bytes = 9 << 20, .shared_by = {layer}});
    saved.kernel_block_sizes.push_back(16);
  }
  saved.cache.groups[0].layer_names.push_back("layers.extra");
  saved.cache.tensors[0].shared_by.push_back("layers.extra");
  saved.cache.groups[0].layer_specs = {spec_of(CacheKind::full_attention), KVCacheSpec{}};
  saved.cache.groups[1].layers_per_page = 4;
  saved.cache.draft_modules = {{"layers.1", "layers.extra"}, {"layers.2"}};
  saved.layout = CacheLayout::HND;
  saved.attention_backend = AttentionBackend::triton_mla;
  saved.backend = "cuda";
  saved.check = CheckMode::hunt;
  saved.mutants = {"pack-stride", "free-twice"};
  saved.seed = ~std::uint64_t{0};
  saved.layout_rule = LayoutRule::vllm_0_22_1;
  saved.step_time.base_ns = 7;
  saved.budget.query_rows = 0;
  saved.delay_streams = true;
  saved.numbers = Numbers::real;
  saved.block_order = std::uint64_t{1} << 40;
  saved.connector = {.parts = {ConnectorKind::peers, ConnectorKind::host},
                     .num_host_blocks = 7,
                     .load_failed_percent = 0,
                     .load_failure_policy = KVLoadFailurePolicy::fail};
  saved.faults = {{.kind = "flip", .step = 7, .arguments = {{"block", 3}, {"byte", 1 << 20}}},
                  {.kind = "lose", .step = 0, .arguments = {}}};
  saved.expected = {.kind = "page", .step = 7};
  saved.trace = make_sample_trace({.num_requests = 20});
  saved.trace.header.is_encoder_decoder = true;
  return saved;
}

TEST(SavedCase, WritingAndReadingIsTheIdentity) {
  SavedCase saved = case_with_everything();
  for (const bool recorded : {false, true}) {
    if (recorded) {
      const auto samples = find_samples_dir();
      ASSERT_TRUE(samples);
      const auto recording = read_recording(
          (*samples / "recordings/vllm-0.22.1/connectors/connector_mixed_tight/0001.jsonl")
              .string());
      ASSERT_TRUE(recording) << recording.error().message;
      saved.recording = *recording;
    }
    const std::string path = temporary_path("case");
    ASSERT_TRUE(write_saved_case(path, saved));
    const auto read = read_saved_case(path);
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_TRUE(*read == saved);
    EXPECT_EQ(saved_case_to_text(*read), read_whole(path));
  }
}

TEST(SavedCase, TheSmallestCaseIsReadBackToo) {
  const SavedCase saved = testing_files::smallest_case();
  const auto read = read_saved_case(write_temporary(saved_case_to_text(saved)));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(*read == saved);
}

TEST(SavedCase, ACaseCutOffBetweenAnyTwoLinesIsRefused) {
  const std::string text = saved_case_to_text(case_with_everything());
  int cuts = 0;
  for (std::size_t at = text.find('\n'); at + 1 < text.size(); at = text.find('\n', at + 1)) {
    const std::string path = write_temporary(text.substr(0, at + 1));
    EXPECT_NE(refusal(read_saved_case(path), path).find("found the end of the file"),
              std::string::npos);
    ++cuts;
  }
  EXPECT_GE(cuts, 20);
}

TEST(SavedCase, WhatIsWrongIsNamed) {
  const std::string text = saved_case_to_text(case_with_everything());
  const auto refused = [](const std::string& changed_text) {
    const std::string path = write_temporary(changed_text);
    return refusal(read_saved_case(path), path);
  };
  EXPECT_EQ(refused(changed(text, "lockstep_case\":1", "lockstep_case\":0")),
            "FILE:1: field `lockstep_case`: found 0; expected the integer 1");
  EXPECT_EQ(refused(changed(text, "\"HND\"", "\"NDH\"")),
            "FILE:1: field `layout`: found \"NDH\"; expected one of \"NHD\", \"HND\", "
            "\"LBNHC\", \"LBHNC\", \"LHBNC\", \"BLNHC\", \"BLHNC\", \"BHLNC\"");
  EXPECT_EQ(
      refused(changed(text, "\"kernel_block_sizes\":[16,", "\"kernel_block_sizes\":[")),
      "FILE:1: field `kernel_block_sizes`: found an array of 13 elements; expected one size for "
      "each of the 14 groups");
  EXPECT_EQ(refused(changed(text, "\"triton_mla\"", "\"triton\"")),
            "FILE:1: field `attention_backend`: found \"triton\"; expected one of \"flash_attn\", "
            "\"flashinfer\", \"triton_attn\", \"triton_mla\", \"flashmla\", \"cache_only\", "
            "\"any_size\"");
  EXPECT_EQ(refused(changed(text, "\"byte\":1048576", "\"byte\":1048576.0")),
            "FILE:1: field `faults[0].arguments.byte`: found 1048576.0; expected an integer from "
            "-9223372036854775808 to 9223372036854775807");
  EXPECT_EQ(
      refused(changed(text, "\"dtypes\":[\"bf16\",\"fp32\"]", "\"dtypes\":[\"bf16\"]")),
      "FILE:1: field `cache.groups[11].spec.dtypes`: found an array of 1 element; expected one "
      "element type for each of the 2 shapes");
  EXPECT_EQ(refused(changed(text, "\"num_blocks\":9,", "\"num_blocks\":7,")),
            "FILE:1: field `cache.tensors`: found an array of 14 elements; expected whole pages of "
            "7 blocks; a tensor has 9437184 bytes");
  for (const char* layer : {"layers.11", "layers.1", "layers.99"})  // of states, twice, of none
    EXPECT_EQ(refused(changed(text, "[\"layers.2\"]]", fmt::format("[\"{}\"]]", layer))),
              fmt::format("FILE:1: field `cache.draft_modules[1]`: found an array of 1 element; "
                          "expected layers with rows, each in one module; '{}' is none",
                          layer));
  EXPECT_EQ(refused(changed(text, "\"id\":\"r1\"", "\"id\":\"r0\"")),
            "FILE:4: field `id`: found \"r0\"; expected a name that no earlier request has");
  const auto lines = std::count(text.begin(), text.end(), '\n');
  EXPECT_EQ(
      refused(changed(text, "\"recorded\":false", "\"recorded\":true")),
      fmt::format("FILE:{}: found the end of the file; expected the header of the case's recording",
                  lines + 1));
  EXPECT_EQ(
      refused(text + text),
      fmt::format("FILE:{}: found a line after the end of the case; expected none", lines + 1));
}

TEST(KnownFile, ADayIsOneOfTheCalendar) {
  const auto is_read = [](std::string_view day) {
    return read_known_file(write_temporary(fmt::format(
                               R"({{"lockstep_known":1,"known":[{{"id":"a","check":"b",)"
                               R"("until":"{}"}}]}})",
                               day)))
        .has_value();
  };
  for (const char* day : {"2027-01-31", "2028-02-29", "2027-12-01"}) EXPECT_TRUE(is_read(day));
  for (const char* day : {"2027-02-31", "2027-02-29", "2027-00-10", "2027-1-31", "2027-04-31"})
    EXPECT_FALSE(is_read(day)) << day;
}

TEST(KnownFile, OneFileServesPytestToo) {
  const auto known = read_known_file(write_temporary(
      R"({"lockstep_known":1,"known":[{"id":"a","check":"b","test":"recording[*]"}]})"));
  ASSERT_TRUE(known) << known.error().message;
  EXPECT_EQ(known->front().check, "b");
}

TEST(OutputFile, AFileIsThereWholeOrNotAtAll) {
  const std::string folder = temporary_path("folder");
  std::filesystem::create_directory(folder);
  const std::string path = folder + "/file";
  {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->write("half"));
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "an abandoned file is left behind";
  ASSERT_TRUE(write_output(path, "first"));
  {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->write("second"));
    EXPECT_EQ(read_whole(path), "first") << "the old file stays until the new one is whole";
    OutputFile moved = std::move(*file);
    ASSERT_TRUE(moved.commit());
  }
  EXPECT_EQ(read_whole(path), "second");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder),
                          std::filesystem::directory_iterator()),
            1);
}

TEST(OutputFile, AFolderThatIsNotThereIsAnError) {
  const std::string path = temporary_path("missing") + "/file";
  EXPECT_EQ(refusal(write_output(path, "x"), path), "FILE: no folder " + temporary_path("missing"));
}

}  // namespace
}  // namespace lockstep
