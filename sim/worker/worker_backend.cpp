#include "sim/worker/worker_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "reference/memory/content.h"
#include "reference/plan/layout.h"
#include "sim/worker/facts_taker.h"
#include "sim/worker/page_map.h"
#include "sim/worker/shared_bytes.h"
#include "sim/worker/worker_protocol.h"
#include "traces/formats/engine_options.h"

namespace lockstep {
namespace {

std::uint64_t word_at(std::span<const std::uint8_t> bytes, std::size_t index) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes.data() + 8 * index, std::min<std::size_t>(8, bytes.size() - 8 * index));
  return word;
}

class WorkerBackend final : public Backend, private EngineWorker {
 public:
  WorkerBackend(std::shared_ptr<ForeignEngines> engines, const BackendConfig& config,
                FactsSink facts)
      : engines_(std::move(engines)), config_(config), facts_(std::move(facts)) {
    for (const std::string& feature : engines_->hello().features)
      if (feature.starts_with("runner:")) runner_ = feature.substr(7);
    for (std::size_t g = 0; g < config_.plan.groups.size(); ++g)
      for (std::size_t l = 0; l < config_.plan.groups[g].layer_names.size(); ++l)
        layers_.emplace_back(g, l);
  }

  std::string_view name() const override { return engines_->hello().engine.name; }
  std::string device() const override {
    return fmt::format("worker of {}, runner {}, on the CPU", engines_->hello().engine.version,
                       runner_);
  }

  // Order: failures, views, sampled tokens, memory, the step itself, restored bytes, facts, probes.
  // A finding at any point ends the step, since later results would depend on it.
  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    LS_CHECK(has_begun_, "step {} of a worker that was not begun", program.step);
    const std::size_t num_groups = config_.plan.groups.size();
    readback = {};
    readback.tables.resize(num_groups);
    readback.table_ends.assign(num_groups, std::vector<std::uint32_t>(program.rows.size()));
    readback.slot_mappings.assign(
        num_groups,
        std::vector<Slot>(static_cast<std::size_t>(program.num_padded_tokens), PAD_SLOT_ID));
    readback.digests.resize(program.probes.size());
    LS_ASSIGN_OR_RETURN(const bool opening_failed, fails(readback));
    if (opening_failed) return {};
    if (!map_.findings().empty()) {
      report(readback, "view", fmt::format("view of {}", map_.findings().front()));
      return {};
    }
    if (!program.loads.empty() || !program.stores.empty())
      return fail("an engine's worker does not run transfers");
    if (!std::exchange(is_decided_, false)) {
      read_probes(program, readback);
      return extract(program, readback);
    }
    LS_ASSIGN_OR_RETURN(const bool sampled, sample(readback));
    if (!sampled) return {};
    LS_CHECK(step_.rows.size() == program.rows.size(), "{} rows decided, {} in the program",
             step_.rows.size(), program.rows.size());
    for (std::size_t i = 0; i < program.rows.size(); ++i) {
      const RowSlice& slice = program.rows[i];
      step_.rows[i].contents.assign(
          program.contents.begin() + slice.first_token,
          program.contents.begin() + slice.first_token + slice.num_tokens);
    }
    prepare_memory(program);
    if (facts_taker_) facts_taker_->before(memory());
    WorkerFacts facts;
    engine_->ask(worker_step_message(step_),
                 [&](JsonObject& reply) { facts = read_worker_facts(reply); });
    step_.sampled.clear();
    LS_ASSIGN_OR_RETURN(const bool failed, fails(readback));
    if (failed) return {};
    put_back_beyond();
    take_facts(program, facts, readback);
    if (facts_taker_ && is_whole(facts))
      facts_(step_.step, facts_taker_->after(memory(), facts, step_));
    if (!readback.reports.empty()) return {};
    rows_ = program.rows;
    read_probes(program, readback);
    return extract(program, readback);
  }

  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    LS_RETURN_IF_ERROR(check_pages());
    std::vector<std::uint8_t> bytes;
    for (std::size_t p = 0; p < pages.size(); ++p) {
      read(pages[p], bytes);
      PageSum sum;
      for (std::size_t i = 0; 8 * i < bytes.size(); ++i) {
        if (i == keys_.size()) keys_.push_back(word_keys(i));
        sum += page_term(word_at(bytes, i), keys_[i]);
      }
      fingerprints[p] = {.a = sum.a, .b = sum.b};
    }
    return {};
  }

  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    LS_RETURN_IF_ERROR(check_pages());
    std::vector<std::uint8_t> bytes;
    read(page, bytes);
    return bytes;
  }

  std::optional<Writer> who_wrote(PageId, std::int64_t) override { return std::nullopt; }

  bool answers_queries() const override { return false; }
  EngineWorker* engine_worker() override { return this; }
  std::vector<std::string> not_checked() const override {
    std::vector<std::string> sentences{
        "attention, compiled kernels, captured graphs and races of streams of the worker: its "
        "Triton "
        "kernels run one by one in Triton's interpreter, which computes bfloat16 wrongly and is "
        "trusted only to copy it"};
    if (has_states(config_.plan.groups))
      sentences.push_back(
          "recurrences of the worker's states, and rows of inputs that convolutions keep of "
          "drafts: "
          "states are words that move and continue where the worker says");
    if (zeroed_beyond_)
      sentences.push_back(
          "bytes of other groups in blocks that the worker zeroes: it clears them too");
    if (copied_beyond_)
      sentences.push_back(
          "bytes of a copied block beyond its own group, where they are the source's: the worker "
          "copies them with the block");
    return sentences;
  }

 private:
  struct Known {
    RequestSpec spec;
    std::int64_t num_tokens = 0;
  };
  // A block's bytes before the step that zeroes it or copies another block into it.
  struct Overwritten {
    BlockId block{};
    std::vector<std::vector<std::uint8_t>> pages;   // per tensor
    std::vector<std::vector<std::uint8_t>> copied;  // the source's pages; zeros for a zeroed block
    bool is_copy = false;
  };

  // Opens a case in the worker's process and maps its caches. A worker that raises over the plan is
  // a finding, so begin() succeeds and the first execute() reports it.
  Result<void> begin(const EngineConfig& engine) override {
    has_begun_ = true;
    LS_ASSIGN_OR_RETURN(layout_, pool_layout(config_.plan, config_.attention_backend,
                                             config_.layout, config_.layout_rule));
    LS_ASSIGN_OR_RETURN(engine_, engines_->take());
    LS_ASSIGN_OR_RETURN(shared_, SharedBytes::create());
    const RecordingHeader header =
        header_of_engine(engine, config_.plan.groups, config_.plan.num_blocks);
    std::vector<std::int64_t> sizes;  // of kernel blocks, where they differ from blocks
    for (std::size_t g = 0; g < config_.plan.groups.size(); ++g)
      if (config_.kernel_block_sizes[g] != config_.plan.groups[g].spec.block_size)
        sizes = config_.kernel_block_sizes;
    engine_->ask(worker_open_message(header, shared_->path(), sizes),
                 [&](JsonObject& reply) { opened_ = read_worker_opened(reply); });
    if (const EngineFailure* failure = engine_->failure()) {
      failure_ = *failure;
      return {};
    }
    if (!opened_.refused.empty())
      return fail(fmt::format("--backend {}: {} refuses {}", engines_->hello().engine.name,
                              device(), opened_.refused));
    if (opened_.layers.size() != layers_.size())
      return fail(fmt::format("the worker has {} layers, the plan {}", opened_.layers.size(),
                              layers_.size()));
    for (WorkerLayer& layer : opened_.layers)
      for (WorkerView& view : layer.parts)
        view.kernel_blocks = std::max<std::int64_t>(1, view.blocks / config_.plan.num_blocks);
    copies_whole_ = std::ranges::any_of(opened_.layers, [&](const WorkerLayer& layer) {
      return layer.page_stride * config_.plan.num_blocks == opened_.bytes;
    });
    LS_RETURN_IF_ERROR(shared_->map(static_cast<std::size_t>(opened_.bytes)));
    LS_ASSIGN_OR_RETURN(
        map_, PageMap::create(config_.plan, layout_, opened_.layers, opened_.order, opened_.bytes));
    group_of_block_.assign(static_cast<std::size_t>(config_.plan.num_blocks), -1);
    if (!map_.findings().empty()) return {};
    if (facts_) facts_taker_.emplace(config_.plan, layout_, opened_.layers, map_, group_of_block_);
    StepProgram all;
    for (std::int32_t b = 0; b < config_.plan.num_blocks; ++b)
      all.poison.push_back({.block = BlockId{b}, .kind = Poison::fresh});
    prepare_memory(all);
    return {};
  }

  const EngineFailure* harness_failure() const override {
    return failure_ && failure_->is_harness() ? &*failure_ : nullptr;
  }
  bool views_hold() const override { return map_.findings().empty(); }
  void add_request(RequestId id, const RequestSpec& spec) override {
    requests_[id] = {.spec = spec, .num_tokens = spec.prompt.size()};
  }
  void decided(const SchedulerOutput& decision) override {
    is_decided_ = true;
    step_.step = decision.step;
    step_.rows.clear();
    step_.finished.clear();
    step_.preempted.clear();
    const std::int32_t* draft = decision.spec_tokens.data();
    for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
      const ScheduledRequest& scheduled = decision.scheduled[i];
      const Known& known = requests_.at(scheduled.id);
      WorkerRow& row = step_.rows.emplace_back();
      row.scheduled = &scheduled;
      row.name = known.spec.name;
      row.spec = &known.spec;
      row.num_known = known.num_tokens;
      for (std::int32_t g = 0; g < decision.num_groups; ++g) {
        const auto blocks = decision.blocks(i, g);
        row.blocks.emplace_back(blocks.begin(), blocks.end());
      }
      row.drafts.assign(draft, draft + scheduled.num_spec);
      draft += scheduled.num_spec;
    }
    const auto name = [&](const std::vector<RequestId>& ids, std::vector<std::string>& names) {
      for (const RequestId id : ids)
        if (const auto known = requests_.find(id); known != requests_.end())
          names.push_back(known->second.spec.name);
    };
    name(decision.finished, step_.finished);
    name(decision.preempted, step_.preempted);
    step_.zero = decision.zero;
    step_.copies = decision.copies;
  }

  void sampled(RequestId id, std::span<const std::int32_t> tokens) override {
    Known& known = requests_.at(id);
    known.num_tokens += std::ssize(tokens);
    step_.sampled.emplace_back(known.spec.name,
                               std::vector<std::int32_t>(tokens.begin(), tokens.end()));
  }

  void dropped(RequestId id, std::int64_t num_tokens) override {
    if (const auto known = requests_.find(id); known != requests_.end())
      known->second.num_tokens = num_tokens;
  }

  bool keeps_states(std::size_t group) const {
    return is_state_kind(config_.plan.groups[group].spec.kind);
  }
  Result<bool> sample(StepReadback& readback) {
    if (!has_states(config_.plan.groups)) return true;
    std::vector<std::string> faults;
    engine_->ask(worker_sample_message(step_),
                 [&](JsonObject& reply) { faults = read_worker_sampled(reply); });
    step_.sampled.clear();
    for (const std::string& fault : faults) report_fault(readback, fault);
    LS_ASSIGN_OR_RETURN(const bool failed, fails(readback));
    return !failed && faults.empty();
  }

  Result<bool> fails(StepReadback& readback) {
    if (const EngineFailure* const failure = engine_->failure()) failure_ = *failure;
    if (!failure_) return false;
    if (failure_->is_harness()) return fail(failure_->what);
    report_failure(readback, *failure_);
    return true;
  }

  // error: no page can be read
  Result<void> check_pages() const {
    LS_CHECK(has_begun_, "a page of a worker that was not begun");
    if (failure_) return fail(failure_->what);
    return map_.findings().empty() ? Result<void>() : fail(map_.findings().front());
  }
  // Converts a block to the byte order of the group that it now belongs to. Each byte of the
  // model's page keeps its content, so poison and stale rows stay comparable.
  void hand_out(BlockId block, std::int32_t group) {
    std::int32_t& now = group_of_block_[index_of(block)];
    if (block == kNullBlock || now == group) return;
    std::vector<std::uint8_t> page;
    for (std::int32_t t = 0; t < map_.num_tensors(); ++t) {
      page.resize(static_cast<std::size_t>(map_.page_size_bytes(t)));
      map_.gather(memory(), t, block, now, page);
      map_.scatter(shared_->bytes(), t, block, group, page);
    }
    now = group;
  }

  void prepare_memory(const StepProgram& program) {
    for (const TableUpdate& update : program.table_updates)
      for (std::uint32_t i = 0; i < update.count; ++i)
        hand_out(program.table_block_ids[update.begin + i], update.group);
    for (const PartCopy& part : program.parts) hand_out(part.target, part.group);
    std::vector<std::uint8_t> page;
    for (const PoisonBlock& poison : program.poison)
      if (poison.kind == Poison::freed && std::ranges::count(step_.zero, poison.block) > 0)
        hand_out(poison.block, -1);
    for (const PoisonBlock& poison : program.poison)
      for (std::int32_t t = 0; t < map_.num_tensors(); ++t) {
        page.resize(static_cast<std::size_t>(map_.page_size_bytes(t)));
        const std::uint64_t key =
            poison_key(static_cast<Unwritten>(poison.kind), t, index_of(poison.block));
        for (std::size_t i = 0; 8 * i < page.size(); ++i) {
          const std::uint64_t word = poison_word(key, i);
          std::memcpy(page.data() + 8 * i, &word, std::min<std::size_t>(8, page.size() - 8 * i));
        }
        map_.scatter(shared_->bytes(), t, poison.block, group_of_block_[index_of(poison.block)],
                     page);
      }
    overwritten_.clear();
    for (const BlockId block : step_.zero) overwrite(block, nullptr);
    for (const KVCacheBlockCopy& copy : step_.copies) overwrite(copy.to, &copy.from);
  }

  void overwrite(BlockId block, const BlockId* source) {
    Overwritten& before = overwritten_.emplace_back();
    before.block = block;
    before.is_copy = source != nullptr;
    for (std::int32_t t = 0; t < map_.num_tensors(); ++t) {
      read({.tensor = t, .block = block}, before.pages.emplace_back());
      std::vector<std::uint8_t>& copied = before.copied.emplace_back(before.pages.back().size());
      if (source != nullptr)
        map_.gather(memory(), t, *source, group_of_block_[index_of(block)], copied);
    }
  }

  // Restores bytes outside the block's own group. The worker zeroes and copies a block for all
  // groups at once, the model only for the block's group. There, a byte that is now zero or the
  // source's gets its previous value; any other change stays, and the comparison finds it.
  void put_back_beyond() {
    std::vector<std::uint8_t> page;
    for (const Overwritten& before : overwritten_)
      for (std::int32_t t = 0; t < map_.num_tensors(); ++t) {
        const std::int32_t group = group_of_block_[index_of(before.block)];
        const std::vector<bool>& of_any = map_.used_bytes_of_any(t);
        read({.tensor = t, .block = before.block}, page);
        for (std::size_t i = 0; i < page.size(); ++i) {
          const bool is_own = group >= 0 && map_.used_bytes(t, group)[i];
          const bool is_reached =
              of_any[i] || (before.is_copy ? copies_whole_ : opened_.order.empty());
          if (is_own || !is_reached) continue;
          if (page[i] != before.copied[t][i] || page[i] == before.pages[t][i]) continue;
          page[i] = before.pages[t][i];
          (before.is_copy ? copied_beyond_ : zeroed_beyond_) = true;
        }
        map_.scatter(shared_->bytes(), t, before.block, group, page);
      }
  }

  bool is_whole(const WorkerFacts& facts) const {
    std::int64_t num_tokens = 0;
    for (const std::int32_t count : facts.num_tokens) num_tokens += count;
    return facts.num_tokens.size() == facts.rows.size() &&
           std::ssize(facts.positions) == num_tokens &&
           (facts.rows.empty() || facts.groups.size() == config_.plan.groups.size()) &&
           std::ranges::all_of(facts.groups, [&](const WorkerGroupFacts& group) {
             const auto g = static_cast<std::size_t>(&group - facts.groups.data());
             return group.tables.size() == facts.rows.size() &&
                    std::ssize(group.slots) == (keeps_states(g) ? 0 : num_tokens) &&
                    (group.reads.empty() || group.reads.size() == facts.rows.size());
           });
  }

  void take_facts(const StepProgram& program, const WorkerFacts& facts, StepReadback& readback) {
    for (const std::string& fault : facts.faults) report_fault(readback, fault);
    const std::size_t num_groups = config_.plan.groups.size();
    if (!is_whole(facts) || facts.rows.size() != program.rows.size()) {
      report(readback, "batch",
             fmt::format("batch: the worker ran {} rows of {} tokens; scheduled are {} rows of {}",
                         facts.rows.size(), facts.positions.size(), program.rows.size(),
                         program.contents.size()));
      return;
    }
    reads_.assign(num_groups, std::vector<std::vector<std::int32_t>>(program.rows.size()));
    for (std::size_t row = 0; row < program.rows.size(); ++row) {
      std::size_t first = 0, at = 0;
      for (; at < facts.rows.size() && facts.rows[at] != step_.rows[row].name; ++at)
        first += static_cast<std::size_t>(facts.num_tokens[at]);
      if (at == facts.rows.size()) {
        report(readback, "batch",
               fmt::format("batch: {} is scheduled but has no row", step_.rows[row].name));
        return;
      }
      if (facts.num_tokens[at] != program.rows[row].num_tokens) {
        report(
            readback, "batch",
            fmt::format("batch: the worker runs {} tokens of {}; scheduled are {}",
                        facts.num_tokens[at], step_.rows[row].name, program.rows[row].num_tokens));
        return;
      }
      take_row(program.rows[row], row, facts, at, first, readback);
    }
  }

  void take_row(const RowSlice& slice, std::size_t row, const WorkerFacts& facts, std::size_t at,
                std::size_t first, StepReadback& readback) {
    for (std::int32_t i = 0; i < slice.num_tokens; ++i)
      if (facts.positions[first + i] != slice.first_position + i) {
        report(readback, "position",
               fmt::format("position: token {} of {} has position {}; expected {}", i,
                           step_.rows[row].name, facts.positions[first + i],
                           slice.first_position + i));
        return;
      }
    names_[slice.row] = step_.rows[row].name;
    for (std::size_t g = 0; g < facts.groups.size(); ++g) {
      const WorkerGroupFacts& group = facts.groups[g];
      std::vector<std::int32_t>& tables = readback.tables[g];
      tables.insert(tables.end(), group.tables[at].begin(), group.tables[at].end());
      readback.table_ends[g][row] = static_cast<std::uint32_t>(tables.size());
      if (!keeps_states(g))
        std::copy_n(group.slots.begin() + static_cast<std::ptrdiff_t>(first), slice.num_tokens,
                    readback.slot_mappings[g].begin() + slice.first_token);
      reads_[g][row] = group.reads.empty() ? group.tables[at] : group.reads[at];
    }
  }

  void read_probes(const StepProgram& program, StepReadback& readback) const {
    for (std::size_t i = 0; i < program.probes.size(); ++i) {
      const AttentionProbe& probe = program.probes[i];
      const auto row = std::ranges::find(rows_, probe.row, &RowSlice::row);
      LS_CHECK(row != rows_.end(), "row {} is read and not scheduled", probe.row);
      const auto& tables = reads_[layers_[probe.layer].first];
      readback.digests[i] = digest(probe, tables[static_cast<std::size_t>(row - rows_.begin())]);
    }
  }

  Result<void> extract(const StepProgram& program, StepReadback& readback) {
    if (program.extractions.empty()) return {};
    std::vector<SavedStates> wanted;
    for (const RowExtraction& extraction : program.extractions)
      wanted.push_back({.request = names_.at(extraction.row),
                        .layer = opened_.layers[static_cast<std::size_t>(extraction.layer)].name,
                        .num_tokens = extraction.num_tokens});
    std::vector<std::string> files;
    engine_->ask(worker_extract_message(wanted),
                 [&](JsonObject& reply) { files = read_worker_extracted(reply); });
    LS_ASSIGN_OR_RETURN(const bool failed, fails(readback));
    if (failed) return {};
    for (const std::string& file : files)
      LS_RETURN_IF_ERROR(append_saved_states(file, readback.extracted));
    return {};
  }

  std::uint64_t digest(const AttentionProbe& probe, std::span<const std::int32_t> table) const {
    const LayerMemory& model = layout_.layers[static_cast<std::size_t>(probe.layer)];
    const std::int64_t rows = model.rows_per_block();
    const WorkerLayer& layer = opened_.layers[static_cast<std::size_t>(probe.layer)];
    const auto row_bytes = static_cast<std::size_t>(layer.parts.front().row_bytes);
    std::uint64_t sum = 0;
    for (std::int64_t position = probe.first; position < probe.last; ++position) {
      const std::int64_t entry = position / rows;
      if (entry >= std::ssize(table)) continue;
      const std::int32_t block = table[static_cast<std::size_t>(entry)];
      if (block < 0 || block >= config_.plan.num_blocks) continue;
      for (std::int64_t part = 0; part < model.num_kv(); ++part)
        for (std::int64_t head = 0; head < model.parts.front().heads; ++head) {
          const std::int64_t at =
              PageMap::row_offset(layer, BlockId{block}, part, position % rows, head);
          const auto row = memory().subspan(static_cast<std::size_t>(at), row_bytes);
          std::uint64_t digest = 0;
          for (std::size_t i = 0; 8 * i < row.size(); ++i)
            digest += row_digest_term(word_at(row, i), i);
          sum += placed_digest(digest, position, part, head);
        }
    }
    return sum;
  }

  void read(PageId page, std::vector<std::uint8_t>& bytes) const {
    bytes.resize(static_cast<std::size_t>(map_.page_size_bytes(page.tensor)));
    map_.gather(memory(), page.tensor, page.block, group_of_block_[index_of(page.block)], bytes);
  }
  std::span<const std::uint8_t> memory() const { return shared_->bytes(); }
  // Adds a report, which the comparison turns into a divergence of Phase::memory_check.
  static void report(StepReadback& readback, std::string kind, std::string message) {
    auto& made = readback.reports.emplace_back();
    made.kind = std::move(kind);
    made.kernel = "worker";
    made.message = std::move(message);
  }

  // Reports a line of the worker's process. Lines about metadata or the batch start with that word
  // and keep it; all others are faults of inputs.
  static void report_fault(StepReadback& readback, const std::string& fault) {
    const bool is_named = fault.starts_with("metadata") || fault.starts_with("batch");
    report(readback, is_named ? "" : "input", is_named ? fault : "input: " + fault);
  }
  static void report_failure(StepReadback& readback, const EngineFailure& failure) {
    report(readback, failure.kind,
           fmt::format("{}: {}{}{}", failure.kind, failure.what, failure.trace.empty() ? "" : "\n",
                       failure.trace));
  }

  const std::shared_ptr<ForeignEngines> engines_;
  const BackendConfig config_;
  const FactsSink facts_;  // absent: not recorded
  std::optional<FactsTaker> facts_taker_;
  std::string runner_ = "unknown";
  std::vector<std::pair<std::size_t, std::size_t>> layers_;  // group, index in it
  bool has_begun_ = false;
  ForeignEngines::Lease engine_;
  std::optional<EngineFailure> failure_;  // since begin(); ends the case
  std::unique_ptr<SharedBytes> shared_;
  MemoryPlan layout_;
  WorkerOpened opened_;
  PageMap map_;
  std::vector<std::int32_t> group_of_block_;
  std::map<RequestId, Known> requests_;
  WorkerStep step_;
  bool is_decided_ = false;     // True from decided() to its execute()
  std::vector<RowSlice> rows_;  // of the last executed step
  bool copies_whole_ = false;   // blocks are contiguous in memory: a copy includes their padding
  std::vector<Overwritten> overwritten_;
  bool zeroed_beyond_ = false, copied_beyond_ = false;
  std::vector<std::vector<std::vector<std::int32_t>>> reads_;  // [group][row]
  std::map<std::int32_t, std::string> names_;  // per row of the engine: its last request
  std::vector<WordKeys> keys_;
};

}  // namespace

ForeignEngineOptions worker_engine_options(std::string command) {
  ForeignEngineOptions options{.command = std::move(command),
                               .option = "--backend",
                               .hello = hello_message_of(kWorkerProtocol, kWorkerProtocolVersion)};
  options.read_hello = [](JsonObject& reply) {
    return read_hello_of(reply, kWorkerProtocol, kWorkerProtocolVersion);
  };
  options.time_limit = std::chrono::seconds(300);
  options.start_limit = std::chrono::seconds(600);  // a busy machine imports for minutes
  return options;
}

Result<std::unique_ptr<Backend>> make_worker_backend(std::shared_ptr<ForeignEngines> engines,
                                                     const BackendConfig& config, FactsSink facts) {
  const auto refuse = [&](std::string_view what) {
    return fail(fmt::format("--backend {}: {}", engines->hello().engine.name, what));
  };
  // The worker's kernels run in its own process, one by one: these options have no meaning there.
  if (config.check != CheckMode::fast || config.num_streams > 1 || config.delay_streams ||
      config.max_cudagraph_capture_size > 0 || config.numbers != Numbers::words)
    return refuse("--check, --streams, --graphs and --numbers need Lockstep's own kernels");
  if (!config.mutant.empty())
    return refuse(fmt::format("mutant {} is not its own; plant a defect in the worker with --plant",
                              config.mutant));
  if (config.num_host_blocks > 0) return refuse("KV connectors and host tiers are not supported");
  for (const KVCacheGroupSpec& group : config.plan.groups)
    if (!is_prefix_cacheable(group.spec) || !has_row_per_token(group) ||
        reads_beside_tokens(group.spec))
      return refuse(
          "rings, compressed rows, windows that are computed again, cross attention, sinks and "
          "reference windows are not supported");
  if (config.parallel.tp_size > 1 || config.parallel.pp_size > 1 || config.context.num_ranks > 1)
    return refuse("ranks are not supported");
  return std::make_unique<WorkerBackend>(std::move(engines), config, std::move(facts));
}

}  // namespace lockstep
