// Plans what a step reads back through its block tables, within a budget of cache rows (one row:
// one token, one layer, K or V, one KV head).
//
// Invariants
// (1) The tokens just written come first, in every layer. Then come earlier positions, in rotation
//     over requests, layers and positions, so that every readable row is read eventually.
// (2) Only positions that the layer's kind may attend to are read: a window, a chunk, or
//     everything.
// (3) What the budget leaves out is counted.
// (4) Queries of a chunk are the last tokens of its step, in order; those of a layer are adjacent.
//
// Not checked: rows that no budgeted probe reaches before their block is reused.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "reference/memory/attention_oracle.h"
#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"
#include "sim/step/model_step.h"
#include "sim/step/worker.h"

namespace lockstep {

// The expected result of a probe or query, in the order of the program's.
struct ProbeExpectation {
  RequestId request{};
  std::uint64_t digest = 0;
};
struct QueryExpectation {
  RequestId request{};
  std::int32_t layer = 0;
  ContentId query = 0;
  std::vector<ContentId> contents;  // contents of the rows that it reads
  std::vector<double> output{};
  double tolerance = 0;
};

// How the queries of a step are chosen.
struct QueryPlan {
  std::int64_t rows = 0;  // budget of cache rows per step, counted once per query
  bool whole = false;     // a query reads its full range, whatever the budget
  bool chunks = false;    // all tokens of a step, layer by layer in turn; else each request's last
  DType dtype = DType::fp32;  // Backend::query_dtype()
};

class ProbePlanner {
 public:
  // `num_members`: threads that may call expect().
  ProbePlanner(const BackendConfig& config, const MemoryModel& model, Worker& worker,
               std::int64_t probe_rows, const QueryPlan& queries, int num_members);

  // Appends probes and queries to a built program. Rows for which is_void(index) is true are not
  // read: their contents are undefined.
  void plan(StepProgram& program, std::span<const RequestId> requests,
            const std::function<bool(std::size_t)>& is_void);
  // Expected results of the planned program are computed in pieces, which threads may share while a
  // backend executes it: first all digests, then queries. `member`: below num_members, one thread
  // at a time.
  std::int64_t num_pieces() const { return 1 + std::ssize(pieces_); }
  void expect(const StepProgram& program, std::int64_t piece, int member);

  // REQUIRES: expect() of every piece since the last plan().
  std::span<const ProbeExpectation> probes() const { return probes_; }
  std::span<const QueryExpectation> queries() const { return queries_; }
  std::int64_t rows_read() const { return rows_read_; }          // since the start
  std::int64_t rows_left_out() const { return rows_left_out_; }  // readable, but not read
  // Query tokens of chunks, summed over layers: planned ones, and those that the budget left out.
  std::int64_t tokens_asked() const { return tokens_asked_; }
  std::int64_t tokens_left_out() const { return tokens_left_out_; }

 private:
  // A row of the program in a layer, with its readable positions.
  struct Candidate {
    std::size_t index = 0;  // of program.rows
    std::int32_t layer = 0;
    Reach reach;
    std::int64_t unread = 0;  // readable positions before the written ones
  };

  // The query heads of one KV head of a query.
  struct Piece {
    std::size_t query = 0;
    std::int32_t kv_head = 0;
  };

  const KVCacheSpec& spec_of(const ModelLayer& layer) const {
    return config_.plan.groups[layer.group].spec;
  }
  std::int64_t rows_of(const ModelLayer& layer, std::int64_t positions) const;
  // Returns the cache rows of positions [first, last) that this rank keeps.
  std::int64_t rows_kept(const ModelLayer& layer, std::int64_t first, std::int64_t last) const;
  // Adds probes of positions [first, last), without the gap, and charges the budget.
  void probe(StepProgram& program, std::span<const RequestId> requests, const Candidate& at,
             std::int64_t first, std::int64_t last);
  // The two parts of rule (1).
  void probe_written(StepProgram& program, std::span<const RequestId> requests);
  void probe_before(StepProgram& program, std::span<const RequestId> requests);
  void add_queries(StepProgram& program, std::span<const RequestId> requests);
  void add_chunks(StepProgram& program, std::span<const RequestId> requests);
  // Adds the query of one token of the slice. Returns the number of rows that it reads; 0: no
  // query.
  std::int64_t add_query(StepProgram& program, RequestId id, const Candidate& at,
                         std::int32_t token, std::int64_t budget);
  // Returns true if the reference can compute the layer's attention outputs.
  bool is_queried(const ModelLayer& layer) const;
  Reach reach_of_query(const RowSlice& slice, RequestId id, const ModelLayer& layer,
                       std::int32_t token) const;

  const BackendConfig& config_;
  const MemoryModel& model_;
  Worker& worker_;
  const std::int64_t probe_rows_;
  const QueryPlan query_plan_;
  std::vector<Candidate> candidates_;
  std::vector<ProbeExpectation> probes_;
  std::vector<QueryExpectation> queries_;
  std::vector<Piece> pieces_;
  std::vector<DecodedRows> decoded_rows_;  // of each member
  std::int64_t budget_ = 0;
  std::size_t turn_ = 0;         // next candidate to probe, over steps
  std::int64_t query_turn_ = 0;  // next candidate or layer to query, over steps
  std::int64_t rows_read_ = 0;
  std::int64_t rows_left_out_ = 0;
  std::int64_t tokens_asked_ = 0;
  std::int64_t tokens_left_out_ = 0;
};

}  // namespace lockstep
