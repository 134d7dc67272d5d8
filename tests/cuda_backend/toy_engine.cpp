#include "tests/cuda_backend/toy_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "cuda_backend/backends.h"

namespace lockstep {

ToyEngine::ToyEngine(const ToyPlan& plan) : plan_(plan) {
  const KVCacheConfig& config = plan_.config.plan;
  std::int32_t index = 0;
  for (std::size_t g = 0; g < config.groups.size(); ++g)
    for (const std::string& name : config.groups[g].layer_names)
      for (std::size_t t = 0; t < config.tensors.size(); ++t)
        if (std::ranges::count(config.tensors[t].shared_by, name) > 0) {
          const auto earlier = std::ranges::count_if(layers_, [&](const Layer& layer) {
            return layer.group == std::int32_t(g) && layer.tensor == std::int32_t(t);
          });
          layers_.push_back({std::int32_t(g), std::int32_t(t), index++, std::int32_t(earlier)});
        }
  for (std::size_t t = 0; t < config.tensors.size(); ++t) {
    const std::int64_t page = page_bytes(std::int32_t(t));
    oracle::Bytes& bytes = tensors_.emplace_back(config.tensors[t].size_bytes);
    for (std::size_t at = 0; at < bytes.size(); ++at)
      bytes[at] = oracle::poison_byte(0, int(t), std::int64_t(at) / page, std::int64_t(at) % page);
  }
  for (std::int32_t block = 1; block < config.num_blocks; ++block) free_.push_back(block);
  for (std::int32_t row = plan_.config.num_rows; row-- > 0;) free_rows_.push_back(row);
}

int ToyEngine::num_parts(std::int32_t group) const {
  const CacheKind kind = spec(group).kind;
  return kind == CacheKind::mla || kind == CacheKind::hidden_state ? 1 : 2;
}
std::int64_t ToyEngine::page_bytes(std::int32_t tensor) const {
  return plan_.config.plan.tensors[tensor].size_bytes / plan_.config.plan.num_blocks;
}
std::uint64_t ToyEngine::content(const Request& request, std::int32_t position) const {
  return oracle::mix(request.id * 1000003 + std::uint64_t(position));
}
oracle::Bytes ToyEngine::row(const Layer& layer, std::uint64_t content, int part, int head) const {
  return oracle::row(content, layer.index, part, head, int(spec(layer.group).head_size),
                     spec(layer.group).dtype);
}

std::int64_t ToyEngine::place_of(const Layer& layer, std::int32_t block, int part,
                                 std::int32_t offset, int head) const {
  const KVCacheSpec& s = spec(layer.group);
  const std::int64_t row_bytes = s.head_size * oracle::itemsize(s.dtype), heads = s.num_kv_heads;
  if (num_parts(layer.group) == 1)
    return block * page_bytes(layer.tensor) + (offset * heads + head) * row_bytes;
  const std::int64_t kernel = plan_.config.kernel_block_sizes[layer.group];
  const std::int64_t kernel_block = offset / kernel, token = offset % kernel;
  const std::int64_t row =
      plan_.config.layout == CacheLayout::HND ? head * kernel + token : token * heads + head;
  const std::int64_t half = kernel * heads * row_bytes;  // of a kernel block
  if (plan_.pair_apart) {
    const std::int64_t all_keys = tensors_[layer.tensor].size() / 2;
    return part * all_keys + (block * (s.block_size / kernel) + kernel_block) * half +
           row * row_bytes;
  }
  return block * page_bytes(layer.tensor) + (kernel_block * plan_.pack + layer.place) * 2 * half +
         part * half + row * row_bytes;
}

void ToyEngine::put(std::int32_t tensor, std::int64_t at, const oracle::Bytes& bytes) {
  std::copy(bytes.begin(), bytes.end(), tensors_[tensor].begin() + at);
}

void ToyEngine::poison(std::int32_t block, Poison kind) {
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    const std::int64_t page = page_bytes(std::int32_t(t));
    for (std::int64_t i = 0; i < page; ++i) {
      std::int64_t at = block * page + i;
      if (plan_.pair_apart)
        at = (i < page / 2 ? 0 : std::int64_t(tensors_[t].size()) / 2) + block * (page / 2) +
             i % (page / 2);
      tensors_[t][at] = oracle::poison_byte(int(kind), int(t), at / page, at % page);
    }
  }
}

std::int32_t ToyEngine::take_block() {
  LS_CHECK(!free_.empty(), "the toy pool of {} is too small", plan_.name);
  const std::int32_t block = free_.front();
  free_.pop_front();
  return block;
}
void ToyEngine::free_block(std::int32_t block) {
  free_.push_back(block);
  freed_.push_back({BlockId{block}, Poison::freed});
}

const StepProgram& ToyEngine::next_step() {
  const std::int64_t step = program_.step;
  program_ = {};
  program_.step = step + 1;
  tables_.assign(plan_.config.plan.groups.size(), {});
  table_ends_ = std::vector<std::vector<std::uint32_t>>(tables_.size());
  slots_ = std::vector<std::vector<Slot>>(tables_.size());
  digests_.clear();
  outputs_.clear();
  program_.poison = std::move(freed_);
  freed_.clear();
  for (const PoisonBlock& item : program_.poison) poison(index_of(item.block), item.kind);
  for (std::size_t i = 0; i < running_.size();) {
    if (running_[i].computed < plan_.length) {
      ++i;
      continue;
    }
    finish(running_[i]);
    running_.erase(running_.begin() + std::ptrdiff_t(i));
  }
  admit();
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const std::int32_t left = plan_.length - running_[i].computed;
    const std::int32_t wanted = running_[i].computed < plan_.length / 2 ? 5 + std::int32_t(i) : 1;
    schedule(running_[i], std::min(left, wanted));
  }
  const auto num_tokens = std::int32_t(program_.contents.size());
  // Steps of up to 5 tokens and a prefill's: up to the largest size that tests capture.
  const bool captured = num_tokens <= plan_.config.max_cudagraph_capture_size;
  program_.num_padded_tokens =
      captured && num_tokens <= 4 ? (num_tokens == 3 ? 4 : num_tokens) : (num_tokens + 7) / 8 * 8;
  for (auto& slots : slots_) slots.resize(program_.num_padded_tokens, PAD_SLOT_ID);
  for (const Request& request : running_) ask(request);
  return program_;
}

void ToyEngine::finish(Request& request) {
  program_.clear_rows.push_back(request.row);
  free_rows_.push_back(request.row);
  for (const auto& blocks : request.blocks)
    for (std::int32_t block : blocks)
      if (block != 0) free_block(block);
}

void ToyEngine::admit() {
  while (std::ssize(running_) < plan_.requests && !free_rows_.empty()) {
    Request request;
    request.id = next_id_++;
    request.row = free_rows_.back();
    free_rows_.pop_back();
    request.blocks.resize(plan_.config.plan.groups.size());
    running_.push_back(std::move(request));
    if (program_.step > 1 || std::ssize(running_) % 2 == 0) break;  // not all at once
  }
}

void ToyEngine::schedule(Request& request, std::int32_t num_tokens) {
  const auto first_token = std::int32_t(program_.contents.size());
  const RowSlice slice{request.row, request.computed, num_tokens, first_token};
  program_.rows.push_back(slice);
  for (std::int32_t i = 0; i < num_tokens; ++i)
    program_.contents.push_back(content(request, request.computed + i));
  for (std::int32_t g = 0; g < std::int32_t(request.blocks.size()); ++g) {
    if (has_rows(g)) {
      give_blocks(request, g, request.computed + num_tokens);
      retire_window(request, g);
    } else {
      move_state(request, g);
    }
    tables_[g].insert(tables_[g].end(), request.blocks[g].begin(), request.blocks[g].end());
    table_ends_[g].push_back(std::uint32_t(tables_[g].size()));
    for (std::int32_t i = 0; i < num_tokens; ++i) {
      const std::int64_t position = request.computed + i, size = spec(g).block_size;
      slots_[g].push_back(request.blocks[g][position / size] * size + position % size);
    }
  }
  write_rows(request, request.computed, num_tokens);
  advance_states(request, slice);
  request.computed += num_tokens;
}

void ToyEngine::give_blocks(Request& request, std::int32_t group, std::int32_t up_to) {
  auto& blocks = request.blocks[group];
  const auto first = std::int32_t(blocks.size());
  const auto begin = std::uint32_t(program_.table_block_ids.size());
  while (std::ssize(blocks) * spec(group).block_size < up_to) {
    blocks.push_back(take_block());
    program_.table_block_ids.push_back(BlockId{blocks.back()});
    if (request.id % 2 == 0) zero(group, blocks.back());
  }
  const auto count = std::uint32_t(program_.table_block_ids.size()) - begin;
  if (count > 0) program_.table_updates.push_back({request.row, group, first, begin, count});
}

std::int32_t ToyEngine::first_visible(const Request& request, std::int32_t group) const {
  const KVCacheSpec& s = spec(group);
  if (!is_sliding_window(s.kind)) return 0;
  return std::max(0, request.computed - std::int32_t(s.sliding_window) + 1);
}

// Blocks that lie before the window of the tokens computed so far become the null block.
void ToyEngine::retire_window(Request& request, std::int32_t group) {
  const std::int32_t keep = first_visible(request, group) / std::int32_t(spec(group).block_size);
  for (std::int32_t i = 0; i < keep; ++i) {
    std::int32_t& block = request.blocks[group][i];
    if (block == 0) continue;
    free_block(block);
    block = 0;
    program_.table_edits.push_back({request.row, group, i, kNullBlock});
  }
}

// A state has one block; every third step it moves to another one.
void ToyEngine::move_state(Request& request, std::int32_t group) {
  auto& blocks = request.blocks[group];
  if (blocks.empty()) {
    blocks.push_back(take_block());
    program_.table_updates.push_back(
        {request.row, group, 0, std::uint32_t(program_.table_block_ids.size()), 1});
    program_.table_block_ids.push_back(BlockId{blocks.back()});
    return;
  }
  if (program_.step % 3 != 0 || free_.empty()) return;
  const std::int32_t from = blocks[0], to = take_block();
  blocks[0] = to;
  program_.copies.push_back({group, BlockId{from}, BlockId{to}});
  program_.table_edits.push_back({request.row, group, 0, BlockId{to}});
  free_block(from);
  for (const Layer& layer : layers_) {
    if (layer.group != group) continue;
    const std::int64_t page = page_bytes(layer.tensor);
    for (std::size_t s = 0; s < spec(group).states.size(); ++s) {
      std::int64_t size = oracle::itemsize(spec(group).states[s].dtype);
      for (std::int64_t dim : spec(group).states[s].dims) size *= dim;
      const auto source =
          tensors_[layer.tensor].begin() + from * page + plan_.state_offsets[group][s];
      put(layer.tensor, to * page + plan_.state_offsets[group][s],
          oracle::Bytes(source, source + size));
    }
  }
}

void ToyEngine::zero(std::int32_t group, std::int32_t block) {
  program_.zero.push_back({group, BlockId{block}});
  const KVCacheSpec& s = spec(group);
  const oracle::Bytes zeros(s.head_size * oracle::itemsize(s.dtype), 0);
  for (const Layer& layer : layers_)
    for (int part = 0; layer.group == group && part < num_parts(group); ++part)
      for (std::int32_t offset = 0; offset < s.block_size; ++offset)
        for (int head = 0; head < s.num_kv_heads; ++head)
          put(layer.tensor, place_of(layer, block, part, offset, head), zeros);
}

void ToyEngine::write_rows(const Request& request, std::int32_t first, std::int32_t count) {
  for (const Layer& layer : layers_) {
    if (!has_rows(layer.group)) continue;
    const KVCacheSpec& s = spec(layer.group);
    for (std::int32_t p = first; p < first + count; ++p)
      for (int part = 0; part < num_parts(layer.group); ++part)
        for (int head = 0; head < s.num_kv_heads; ++head)
          put(layer.tensor,
              place_of(layer, request.blocks[layer.group][p / s.block_size], part,
                       std::int32_t(p % s.block_size), head),
              row(layer, content(request, p), part, head));
  }
}

void ToyEngine::advance_states(const Request& request, const RowSlice& slice) {
  for (std::int32_t g = 0; g < std::int32_t(request.blocks.size()); ++g) {
    if (has_rows(g)) continue;
    const BlockId block{request.blocks[g][0]};
    program_.state_updates.push_back({slice.row, g, slice.first_position == 0 ? kNullBlock : block,
                                      block, slice.first_position, slice.num_tokens,
                                      slice.first_token});
    std::vector<std::uint64_t> contents;
    for (std::int32_t p = 0; p < slice.first_position + slice.num_tokens; ++p)
      contents.push_back(content(request, p));
    for (const Layer& layer : layers_)
      for (std::size_t s = 0; layer.group == g && s < spec(g).states.size(); ++s) {
        std::int64_t size = oracle::itemsize(spec(g).states[s].dtype);
        for (std::int64_t dim : spec(g).states[s].dims) size *= dim;
        put(layer.tensor, index_of(block) * page_bytes(layer.tensor) + plan_.state_offsets[g][s],
            oracle::state(oracle::Bytes(size, 0), contents, layer.index, int(s)));
      }
  }
}

// Every layer with rows is probed over what a request can see; the first row layer is attended to.
void ToyEngine::ask(const Request& request) {
  bool asked = false;
  for (const Layer& layer : layers_) {
    if (!has_rows(layer.group)) continue;
    const KVCacheSpec& s = spec(layer.group);
    const std::int32_t first = std::min(first_visible(request, layer.group), request.computed - 1);
    program_.probes.push_back({request.row, layer.index, first, request.computed});
    std::uint64_t digest = 0;
    for (std::int32_t p = first; p < request.computed; ++p)
      for (int part = 0; part < num_parts(layer.group); ++part)
        for (int head = 0; head < s.num_kv_heads; ++head)
          digest +=
              oracle::digest_of_row(row(layer, content(request, p), part, head), p, part, head);
    digests_.push_back(digest);
    if (asked || s.kind == CacheKind::hidden_state) continue;
    asked = true;
    const std::uint64_t query = content(request, request.computed - 1);
    program_.queries.push_back({request.row, layer.index, first, request.computed, query});
    const int heads = int(s.num_kv_heads) * plan_.config.queries_per_kv;
    for (int q = 0; q < heads; ++q) {
      const oracle::Bytes bytes =
          oracle::row(query, layer.index, 2, q, int(s.head_size), DType::fp32);
      std::vector<double> numbers;
      for (int d = 0; d < s.head_size; ++d)
        numbers.push_back(oracle::element(bytes.data() + 4 * d, DType::fp32));
      std::vector<oracle::Bytes> keys, values;
      for (std::int32_t p = first; p < request.computed; ++p) {
        const int head = q / plan_.config.queries_per_kv;
        keys.push_back(row(layer, content(request, p), 0, head));
        values.push_back(row(layer, content(request, p), num_parts(layer.group) - 1, head));
      }
      const auto output = oracle::attention(numbers, keys, values, s.dtype);
      outputs_.insert(outputs_.end(), output.begin(), output.end());
    }
  }
}

std::vector<std::string> ToyEngine::compare(const StepReadback& readback) const {
  std::vector<std::string> found;
  const auto note = [&](bool equal, std::string what) {
    if (!equal) found.push_back(fmt::format("step {}: {}", program_.step, what));
  };
  for (std::size_t g = 0; g < tables_.size(); ++g) {
    note(readback.tables[g] == tables_[g], fmt::format("tables of group {}", g));
    note(readback.table_ends[g] == table_ends_[g], fmt::format("table lengths of group {}", g));
    if (has_rows(std::int32_t(g)))
      note(readback.slot_mappings[g] == slots_[g], fmt::format("slots of group {}", g));
  }
  note(readback.digests == digests_, "digests");
  note(readback.outputs.size() == outputs_.size(), "number of outputs");
  for (std::size_t i = 0; i < std::min(outputs_.size(), readback.outputs.size()); ++i)
    if (!(std::abs(readback.outputs[i] - outputs_[i]) <=
          1e-4 * std::max(1.0, std::abs(outputs_[i])))) {
      note(false, fmt::format("output {}: {} instead of {}", i, readback.outputs[i], outputs_[i]));
      break;
    }
  for (const MemoryReport& report : readback.reports) note(false, report.message);
  return found;
}

std::vector<std::string> ToyEngine::compare_pages(Backend& backend) const {
  std::vector<PageId> pages;
  for (std::int32_t t = 0; t < std::int32_t(tensors_.size()); ++t)
    for (std::int32_t b = 0; b < plan_.config.plan.num_blocks; ++b)
      pages.push_back({t, BlockId{b}});
  std::vector<Fingerprint> prints(pages.size());
  std::vector<std::string> found;
  if (auto done = backend.fingerprint_pages(pages, prints); !done) return {done.error().message};
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto size = std::size_t(page_bytes(pages[i].tensor));
    const std::uint8_t* page = tensors_[pages[i].tensor].data() + size * index_of(pages[i].block);
    const auto [a, b] = oracle::fingerprint(page, size);
    if (prints[i] == Fingerprint{a, b}) continue;
    const auto bytes = backend.read_page(pages[i]);
    if (!bytes) return {bytes.error().message};
    const auto differs = std::mismatch(bytes->begin(), bytes->end(), page);
    found.push_back(fmt::format("step {}: page of block {} in tensor {}: byte {} of {}",
                                program_.step, index_of(pages[i].block), pages[i].tensor,
                                differs.first - bytes->begin(), size));
  }
  return found;
}

std::vector<std::string> toy_differences(const ToyPlan& plan, int steps) {
  auto backend = make_simt_backend(plan.config);
  if (!backend) return {"refused: " + backend.error().message};
  return toy_differences(plan, **backend, steps);
}

std::vector<std::string> toy_differences(const ToyPlan& plan, Backend& backend, int steps) {
  ToyEngine engine(plan);
  if (auto fresh = engine.compare_pages(backend); !fresh.empty()) return fresh;
  StepReadback readback;
  for (int step = 1; step <= steps; ++step) {
    if (auto done = backend.execute(engine.next_step(), readback); !done)
      return {"error: " + done.error().message};
    auto found = engine.compare(readback);
    if (step % 3 == 0 || !found.empty())
      for (std::string& line : engine.compare_pages(backend)) found.push_back(std::move(line));
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace lockstep
