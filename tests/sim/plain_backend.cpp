#include "tests/sim/plain_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "tests/sim/plain_words.h"

namespace lockstep {

using namespace plain;

namespace {

bool one_row(const KVCacheSpec& spec) {
  return spec.kind == CacheKind::mla || spec.kind == CacheKind::hidden_state;
}

}  // namespace

std::int64_t PlainBackend::state_bytes(const StateTensorSpec& state) {
  std::int64_t elements = 1;
  for (const std::int64_t dim : state.dims) elements *= dim;
  return elements * itemsize_bytes(state.dtype);
}

PlainBackend::PlainBackend(const BackendConfig& config) : config_(config) {
  std::map<std::string, int> tensor_of;
  for (std::size_t t = 0; t < config.plan.tensors.size(); ++t) {
    tensors_.emplace_back(static_cast<std::size_t>(config.plan.tensors[t].size_bytes));
    for (const std::string& name : config.plan.tensors[t].shared_by)
      tensor_of[name] = static_cast<int>(t);
  }
  if (is_overlaid(config.layout) && config.layout != CacheLayout::LBNHC &&
      config.layout != CacheLayout::LBHNC)
    throw std::logic_error("plain loops know layers outermost and whole pages");
  bool apart = config.attention_backend == AttentionBackend::flash_attn;
  if (is_overlaid(config.layout)) apart = false;
  for (const KVCacheGroupSpec& group : config.plan.groups)
    if (group.spec.kind == CacheKind::mamba || one_row(group.spec) || group.spec.page_size_padded)
      apart = false;
  for (std::size_t g = 0; g < config.plan.groups.size(); ++g) {
    const KVCacheGroupSpec& group = config.plan.groups[g];
    if (group.layers_per_page != 1) throw std::logic_error("packed groups are not for plain loops");
    tables_.emplace_back(static_cast<std::size_t>(config.num_rows));
    for (const std::string& name : group.layer_names) {
      Layer layer;
      layer.group = static_cast<int>(g);
      layer.tensor = tensor_of.at(name);
      layer.spec = &config_.plan.groups[g].spec;
      if (layer.spec->kind != CacheKind::mamba) {
        layer.parts = one_row(*layer.spec) ? 1 : 2;
        layer.heads = static_cast<int>(layer.spec->num_kv_heads);
        layer.row_bytes = layer.spec->head_size * itemsize_bytes(layer.spec->dtype);
        layer.apart = apart;
      }
      layers_.push_back(layer);
    }
  }
  for (std::size_t t = 0; t < tensors_.size(); ++t)
    for (std::size_t i = 0; i < tensors_[t].size(); ++i)
      poison_byte(static_cast<int>(t), static_cast<std::int64_t>(i), 0);
  make_host_tier();
}

std::int64_t PlainBackend::page_bytes(std::int32_t tensor) const {
  return static_cast<std::int64_t>(tensors_[tensor].size()) / config_.plan.num_blocks;
}

std::int64_t PlainBackend::row_offset(const Layer& layer, std::int64_t block, int part,
                                      std::int64_t token, int head) const {
  const KVCacheSpec& spec = *layer.spec;
  const std::int64_t kernel = config_.kernel_block_sizes[layer.group];
  const std::int64_t plane = kernel * layer.heads * layer.row_bytes;
  const std::int64_t kernel_block = token / kernel;
  const std::int64_t in_kernel = token % kernel;
  if (is_overlaid(config_.layout)) {
    const std::int64_t place = config_.layout == CacheLayout::LBNHC ? in_kernel * layer.heads + head
                                                                    : head * kernel + in_kernel;
    return block * page_bytes(layer.tensor) + kernel_block * layer.parts * plane +
           (place * layer.parts + part) * layer.row_bytes;
  }
  const std::int64_t in_plane = config_.layout == CacheLayout::NHD
                                    ? (in_kernel * layer.heads + head) * layer.row_bytes
                                    : (head * kernel + in_kernel) * layer.row_bytes;
  if (layer.apart) {
    const std::int64_t half = plane * (spec.block_size / kernel);
    return (part * config_.plan.num_blocks + block) * half + kernel_block * plane + in_plane;
  }
  return block * page_bytes(layer.tensor) + (kernel_block * layer.parts + part) * plane + in_plane;
}

std::uint8_t PlainBackend::poison_of(u64 kind, u64 tensor, u64 page, u64 byte) {
  const u64 word = mix64(0x706F69736F6E0000ull + kind) ^ mix64(tensor << 32 | page) ^ (byte / 8);
  return static_cast<std::uint8_t>(word >> (8 * (byte % 8)));
}

void PlainBackend::poison_byte(int tensor, std::int64_t offset, u64 kind) {
  const std::int64_t page_size = page_bytes(tensor);
  tensors_[tensor][static_cast<std::size_t>(offset)] =
      poison_of(kind, static_cast<u64>(tensor), static_cast<u64>(offset / page_size),
                static_cast<u64>(offset % page_size));
}

void PlainBackend::poison_block(std::int32_t block, u64 kind) {
  for (int t = 0; t < static_cast<int>(tensors_.size()); ++t) {
    bool apart = false;
    for (const Layer& layer : layers_) apart |= layer.tensor == t && layer.apart;
    const std::int64_t size = page_bytes(t);
    for (std::int64_t i = 0; i < size; ++i) {
      std::int64_t offset = block * size + i;
      if (apart) {
        const std::int64_t half = size / 2;
        offset = (i < half ? block : config_.plan.num_blocks + block) * half + i % half;
      }
      poison_byte(t, offset, kind);
    }
  }
}

void PlainBackend::update_state(const StepProgram& program, const StateUpdate& update) {
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    if (layer.group != update.group) continue;
    std::vector<std::uint8_t>& bytes = tensors_[layer.tensor];
    std::int64_t in_page = 0;
    for (std::size_t s = 0; s < layer.spec->states.size(); ++s) {
      const std::int64_t size = state_bytes(layer.spec->states[s]);
      const auto at = [&](BlockId block) {
        return bytes.data() + index_of(block) * page_bytes(layer.tensor) + in_page;
      };
      for (std::int64_t i = 0; i < (size + 7) / 8; ++i) {
        // A state truncated in its last word continues from the bytes that exist.
        u64 word = update.source == kNullBlock ? 0 : word_at(at(update.source), size, i);
        for (int t = 0; t < update.num_tokens; ++t) {
          const u64 content = program.contents[update.first_token + t];
          word = word * 0xD1342543DE82EF95ull +
                 mix64(content ^ coordinate_of(l, 16 + s, 0) ^ static_cast<u64>(i));
        }
        put_word(at(update.target), size, i, word);
      }
      in_page += size;
    }
  }
}

void PlainBackend::write_rows(const StepProgram& program, StepReadback& readback) {
  readback.slot_mappings.assign(config_.plan.groups.size(), {});
  for (std::size_t g = 0; g < config_.plan.groups.size(); ++g) {
    const KVCacheSpec& spec = config_.plan.groups[g].spec;
    if (spec.kind == CacheKind::mamba) continue;
    std::vector<Slot>& slots = readback.slot_mappings[g];
    slots.assign(static_cast<std::size_t>(program.num_padded_tokens), PAD_SLOT_ID);
    for (const RowSlice& slice : program.rows)
      for (int t = 0; t < slice.num_tokens; ++t) {
        const std::int64_t position = slice.first_position + t;
        const auto entry = static_cast<std::size_t>(position / spec.block_size);
        slots[static_cast<std::size_t>(slice.first_token + t)] =
            tables_[g][slice.row].at(entry) * spec.block_size + position % spec.block_size;
      }
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      if (layer.group != static_cast<int>(g)) continue;
      for (std::size_t t = 0; t < program.contents.size(); ++t) {
        if (slots[t] < 0) continue;
        for (int part = 0; part < layer.parts; ++part)
          for (int head = 0; head < layer.heads; ++head) {
            std::uint8_t* row =
                tensors_[layer.tensor].data() + row_offset(layer, slots[t] / spec.block_size, part,
                                                           slots[t] % spec.block_size, head);
            for (std::int64_t i = 0; i < (layer.row_bytes + 7) / 8; ++i)
              put_word(row, layer.row_bytes, i,
                       content_word(program.contents[t], l, part, head, i, spec.dtype));
          }
      }
    }
  }
}

std::int64_t PlainBackend::row_of(const Layer& layer, int row, std::int64_t position, int part,
                                  int head) const {
  const std::int64_t size = layer.spec->block_size;
  const std::int32_t block =
      tables_[layer.group][row].at(static_cast<std::size_t>(position / size));
  return row_offset(layer, block, part, position % size, head);
}

u64 PlainBackend::digest(const AttentionProbe& probe) const {
  const Layer& layer = layers_[probe.layer];
  u64 sum = 0;
  for (u64 p = probe.first; p < static_cast<u64>(probe.last); ++p)
    for (int part = 0; part < layer.parts; ++part)
      for (int head = 0; head < layer.heads; ++head) {
        const std::uint8_t* row =
            tensors_[layer.tensor].data() + row_of(layer, probe.row, p, part, head);
        u64 r = 0;
        for (std::int64_t i = 0; i < (layer.row_bytes + 7) / 8; ++i)
          r += mix64(word_at(row, layer.row_bytes, i) ^
                     (static_cast<u64>(i) + 1) * 0x9E3779B97F4A7C15ull);
        sum += mix64(r ^ mix64(p << 16 | static_cast<u64>(part) << 15 | static_cast<u64>(head)));
      }
  return sum;
}

double PlainBackend::element(const Layer& layer, std::int64_t row_offset, std::int64_t i) const {
  const std::uint8_t* at =
      tensors_[layer.tensor].data() + row_offset + i * itemsize_bytes(layer.spec->dtype);
  const auto small = [&](u64 bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const auto mantissa = static_cast<double>(bits & ((u64{1} << mantissa_bits) - 1));
    const auto exponent = static_cast<int>(bits >> mantissa_bits & ((u64{1} << exponent_bits) - 1));
    const double value = std::ldexp(std::ldexp(mantissa, -mantissa_bits) + 1, exponent - bias);
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
  };
  u64 bits = 0;
  std::memcpy(&bits, at, static_cast<std::size_t>(itemsize_bytes(layer.spec->dtype)));
  switch (layer.spec->dtype) {
    case DType::bf16:
      return small(bits, 8, 7);
    case DType::fp16:
      return small(bits, 5, 10);
    case DType::fp32:
      return small(bits, 8, 23);
    case DType::fp8_e4m3:
      return small(bits, 4, 3);
    default:
      return small(bits, 5, 2);
  }
}

void PlainBackend::attend(const AttentionQuery& query, std::vector<float>& outputs) const {
  const Layer& layer = layers_[query.layer];
  const std::int64_t d = layer.spec->head_size;
  for (int head = 0; head < layer.heads * config_.queries_per_kv; ++head) {
    const int kv_head = head / config_.queries_per_kv;
    std::vector<double> weights;
    double total = 0;
    for (std::int64_t p = query.first; p < query.last; ++p) {
      double dot = 0;
      for (std::int64_t i = 0; i < d; ++i) {
        float q = 0;
        const u64 word = content_word(query.content, static_cast<u64>(query.layer), 2,
                                      static_cast<u64>(head), static_cast<u64>(i / 2), DType::fp32);
        const auto half = static_cast<std::uint32_t>(word >> (32 * (i % 2)));
        std::memcpy(&q, &half, 4);
        dot += q * element(layer, row_of(layer, query.row, p, 0, kv_head), i);
      }
      weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(d))));
      total += weights.back();
    }
    for (std::int64_t i = 0; i < d; ++i) {
      double sum = 0;
      for (std::int64_t p = query.first; p < query.last; ++p)
        sum += weights[static_cast<std::size_t>(p - query.first)] *
               element(layer, row_of(layer, query.row, p, layer.parts - 1, kv_head), i);
      outputs.push_back(static_cast<float>(sum / total));
    }
  }
}

void PlainBackend::extract(const RowExtraction& extraction, std::vector<std::uint8_t>& rows) const {
  const Layer& layer = layers_[extraction.layer];
  for (int token = 0; token < extraction.num_tokens; ++token)
    for (int head = 0; head < layer.heads; ++head) {
      const auto first =
          tensors_[layer.tensor].begin() + row_of(layer, extraction.row, token, 0, head);
      rows.insert(rows.end(), first, first + layer.row_bytes);
    }
}

void PlainBackend::copy_block(std::int32_t group, BlockId source, BlockId target) {
  std::vector<std::int64_t> from;
  for_real_bytes(group, index_of(source),
                 [&](int, std::int64_t at, std::int64_t) { from.push_back(at); });
  auto next = from.begin();
  for_real_bytes(group, index_of(target), [&](int t, std::int64_t at, std::int64_t size) {
    std::memmove(tensors_[t].data() + at, tensors_[t].data() + *next++,
                 static_cast<std::size_t>(size));
  });
}

Result<void> PlainBackend::execute(const StepProgram& program, StepReadback& readback) {
  step_ = program.step;
  for (const std::int32_t row : program.clear_rows)
    for (auto& tables : tables_) tables[row].clear();
  for (const BlockCopy& copy : program.settled) copy_block(copy.group, copy.source, copy.target);
  for (const PoisonBlock& poison : program.poison)
    poison_block(index_of(poison.block), static_cast<u64>(poison.kind));
  for (const GroupBlock& zero : program.zero)
    for_real_bytes(zero.group, index_of(zero.block),
                   [&](int t, std::int64_t at, std::int64_t size) {
                     std::memset(tensors_[t].data() + at, 0, static_cast<std::size_t>(size));
                   });
  transfer(program.loads, false);
  for (const PartCopy& part : program.parts) copy_block(part.group, part.source, part.target);
  for (const BlockCopy& copy : program.copies) copy_block(copy.group, copy.source, copy.target);
  for (const TableUpdate& update : program.table_updates) {
    std::vector<std::int32_t>& row = tables_[update.group][update.row];
    row.resize(static_cast<std::size_t>(update.first + update.count));
    for (std::uint32_t i = 0; i < update.count; ++i)
      row[update.first + i] = index_of(program.table_block_ids[update.begin + i]);
  }
  for (const TableEdit& edit : program.table_edits)
    tables_[edit.group][edit.row][edit.index] = index_of(edit.block);
  write_rows(program, readback);
  for (const StateUpdate& update : program.state_updates) update_state(program, update);
  transfer(program.stores, true);
  readback.tables.assign(tables_.size(), {});
  readback.table_ends.assign(tables_.size(), {});
  for (std::size_t g = 0; g < tables_.size(); ++g)
    for (const RowSlice& slice : program.rows) {
      const std::vector<std::int32_t>& row = tables_[g][slice.row];
      readback.tables[g].insert(readback.tables[g].end(), row.begin(), row.end());
      readback.table_ends[g].push_back(static_cast<std::uint32_t>(readback.tables[g].size()));
    }
  readback.digests.clear();
  for (const AttentionProbe& probe : program.probes) readback.digests.push_back(digest(probe));
  readback.outputs.clear();
  for (const AttentionQuery& query : program.queries) attend(query, readback.outputs);
  readback.extracted.clear();
  for (const RowExtraction& extraction : program.extractions)
    extract(extraction, readback.extracted);
  readback.reports.clear();
  return {};
}

Result<std::vector<std::uint8_t>> PlainBackend::read_page(PageId page) {
  const std::int64_t size = page_bytes(page.tensor);
  const auto begin = tensors_[page.tensor].begin() + index_of(page.block) * size;
  return std::vector<std::uint8_t>(begin, begin + size);
}

Result<void> PlainBackend::fingerprint_pages(std::span<const PageId> pages,
                                             std::span<Fingerprint> fingerprints) {
  for (std::size_t n = 0; n < pages.size(); ++n) fingerprints[n] = sum_of(*read_page(pages[n]));
  return {};
}

Fingerprint PlainBackend::sum_of(const std::vector<std::uint8_t>& bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  Fingerprint sum;
  for (std::int64_t i = 0; i < (size + 7) / 8; ++i) {
    const u64 w = word_at(bytes.data(), size, i);
    const u64 k = mix64(2 * static_cast<u64>(i));
    const u64 m = mix64(2 * static_cast<u64>(i) + 1);
    const auto product = [&](u64 key) {
      const auto low = static_cast<std::uint32_t>(w) + static_cast<std::uint32_t>(key);
      const auto high = static_cast<std::uint32_t>(w >> 32) + static_cast<std::uint32_t>(key >> 32);
      return static_cast<u64>(low) * high;
    };
    sum.a += product(k) + w;
    sum.b += product(m) + (w << 32 | w >> 32);
  }
  return sum;
}

std::optional<Writer> PlainBackend::who_wrote(PageId, std::int64_t) {
  return Writer{.kernel = "plain loops", .step = step_, .thread = "the only one"};
}

}  // namespace lockstep
