// A small engine for tests of the whole backend: it makes up requests, blocks and steps, and keeps
// what every byte of the cache should be, byte by byte, in loops that share nothing with the
// backend.
//
// What a ToyPlan says about the layout is written down by hand, not derived: where K and V lie, how
// a block is cut into kernel blocks, where states begin.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "sim/protocol/backend.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep {

struct ToyPlan {
  std::string name;
  BackendConfig config;
  bool pair_apart = false;  // all K before all V in a tensor
  int pack = 1;             // layers side by side in a page
  std::vector<std::vector<std::int64_t>>
      state_offsets;  // per group: bytes of each state in its page
  int requests = 4;
  int length = 60;  // tokens of a request when it ends
};

// Every plan that the tests run: kinds of cache, layouts, splits, padding, two blocks.
std::vector<ToyPlan> toy_plans();

class ToyEngine {
 public:
  explicit ToyEngine(const ToyPlan& plan);

  // Decides one more step and applies it to what is expected.
  const StepProgram& next_step();

  // Everything that differs after execute(): tables, slots, digests, outputs, reports; a line each.
  std::vector<std::string> compare(const StepReadback& readback) const;
  // Every page of the pool, by fingerprint and, where that differs, by its first byte.
  std::vector<std::string> compare_pages(Backend& backend) const;

 private:
  struct Request {
    std::int32_t row = 0;
    std::uint64_t id = 0;
    std::int32_t computed = 0;
    std::vector<std::vector<std::int32_t>> blocks;  // per group, null for what is retired
  };
  struct Layer {
    std::int32_t group, tensor, index, place;  // place: in the pack
  };

  const KVCacheSpec& spec(std::int32_t group) const { return plan_.config.plan.groups[group].spec; }
  bool has_rows(std::int32_t group) const { return spec(group).kind != CacheKind::mamba; }
  int num_parts(std::int32_t group) const;
  std::int64_t page_bytes(std::int32_t tensor) const;
  std::uint64_t content(const Request& request, std::int32_t position) const;
  oracle::Bytes row(const Layer& layer, std::uint64_t content, int part, int head) const;

  std::int64_t place_of(const Layer& layer, std::int32_t block, int part, std::int32_t offset,
                        int head) const;
  void put(std::int32_t tensor, std::int64_t at, const oracle::Bytes& bytes);
  void poison(std::int32_t block, Poison kind);

  std::int32_t take_block();
  void free_block(std::int32_t block);
  void finish(Request& request);
  void admit();
  void schedule(Request& request, std::int32_t num_tokens);
  void give_blocks(Request& request, std::int32_t group, std::int32_t up_to);
  void retire_window(Request& request, std::int32_t group);
  void move_state(Request& request, std::int32_t group);
  void zero(std::int32_t group, std::int32_t block);
  void write_rows(const Request& request, std::int32_t first, std::int32_t count);
  void advance_states(const Request& request, const RowSlice& slice);
  void ask(const Request& request);
  std::int32_t first_visible(const Request& request, std::int32_t group) const;

  ToyPlan plan_;
  std::vector<Layer> layers_;
  std::vector<oracle::Bytes> tensors_;  // what device memory should hold
  std::deque<std::int32_t> free_;
  std::vector<Request> running_;
  std::vector<std::int32_t> free_rows_;
  std::vector<PoisonBlock> freed_;
  std::uint64_t next_id_ = 1;
  StepProgram program_;
  // What the step should read back.
  std::vector<std::vector<std::int32_t>> tables_;
  std::vector<std::vector<std::uint32_t>> table_ends_;
  std::vector<std::vector<Slot>> slots_;
  std::vector<std::uint64_t> digests_;
  std::vector<double> outputs_;
};

// Runs a plan for some steps on a backend that was made for it, and gives the differences of the
// first step that has any, a line each; every third step all pages are compared.
std::vector<std::string> toy_differences(const ToyPlan& plan, Backend& backend, int steps);
// The same on a SIMT backend.
std::vector<std::string> toy_differences(const ToyPlan& plan, int steps);

}  // namespace lockstep
