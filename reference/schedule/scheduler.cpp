#include "reference/schedule/scheduler.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "reference/plan/limits.h"
#include "reference/profiles/compatibility.h"
#include "reference/schedule/scheduler_impl.h"

namespace lockstep {

// Derives the fixed values of a run from the configuration: budgets, hash rule, chunk rule.
Scheduler::Impl::Impl(const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups,
                      BlockSizes sizes, std::int64_t num_blocks, const KVTransfer& transfer,
                      const CacheParts& parts)
    : config(engine),
      profile(engine_profile(engine.engine)),
      block_sizes(sizes),
      state_chunks(engine, profile, groups, sizes),
      coordinator(parts.coordinator(engine, groups, sizes, num_blocks)),
      cache(*coordinator),
      waiting(engine.policy) {
  step.first_new.resize(groups.size());
  num_lookahead = num_lookahead_tokens(config);
  hash_rule = {config.hash_algorithm, sizes.hash_block_size, hash_lookahead_of(config, profile),
               profile.tags_extra_keys};
  token_budget = config.max_num_batched_tokens;
  if (config.spec_method ==
      SpecMethod::draft_model) {  // its input holds one token more than is scheduled
    // Subtracted from the step's budget for max_num_seqs requests, or from the input budget per
    // scheduled request.
    if (profile.draft_slots == DraftSlots::of_max_num_seqs)
      token_budget -= config.max_num_seqs;
    else
      draft_slots = 1;
  }
  // Only mode align saves states at the ends of chunks.
  const bool has_mamba = std::ranges::any_of(
      groups, [](const KVCacheGroupSpec& g) { return is_state_kind(g.spec.kind); });
  splits_at_state_blocks = has_mamba && config.mamba_cache_mode == MambaCacheMode::align;
  // Blocks are freed late if a step in flight could read them while a load writes them.
  if (transfer.connector != nullptr) {
    remote = std::make_unique<RemoteCaches>(transfer, config.policy);
    remote->defers_frees =
        profile.defers_frees && config.async_scheduling && remote->traits.is_kv_consumer;
  }
  if (has_cross_attention(groups)) encoder.emplace(config);
  output.num_groups = static_cast<std::int32_t>(groups.size());
  output.step = -1;
}

std::unique_ptr<Scheduler::Impl> SchedulerParts::scheduler(
    const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
    std::int64_t num_blocks, const KVTransfer& transfer) const {
  return std::make_unique<Scheduler::Impl>(engine, groups, sizes, num_blocks, transfer, *this);
}

// Hashes the whole prompt at once, as vLLM's Request does when it is created.
RequestId Scheduler::Impl::insert(RequestSpec spec) {
  const RequestId id = requests.insert(std::move(spec), cache.num_groups());
  Request& request = at(id);
  if (config.enable_prefix_caching)
    request.hashes.extend(hash_rule, request.tokens, request.cache_salt, request.keys);
  waiting.add(id, request);
  return id;
}

// Ends a request from outside. A finished request that a connector still holds stays as it is.
void Scheduler::Impl::cancel(RequestId id) {
  Request& request = at(id);
  if (request.status == RequestStatus::finished) return;
  if (request.status == RequestStatus::running) {
    std::erase(running, id);
  } else {
    waiting.remove(id, request);
    if (remote != nullptr) remote->remove(id, request);
  }
  retire(id);
}

namespace {

// Checks the shape of groups of host pages, if there are any: the source first, then resident
// groups with blocks of the same size, and a host pool for one request of max_model_len plus two
// blocks. The engine refuses the same plans.
Result<void> check_host_pages(const EngineConfig& config,
                              const std::vector<KVCacheGroupSpec>& groups) {
  if (std::ranges::none_of(groups, belongs_to_pages)) return {};
  const auto num_sources = std::ranges::count(groups, kPageSourceRole, &KVCacheGroupSpec::role);
  const KVCacheGroupSpec& source = groups.front();
  if (num_sources != 1 || source.role != kPageSourceRole)
    return fail("groups: expected one group of role {}, before all others; {} found",
                kPageSourceRole, num_sources);
  bool has_pages = false;
  for (const KVCacheGroupSpec& group : groups) {
    if (!is_resident_pages(group.spec.kind)) continue;
    has_pages = true;
    if (group.spec.block_size != source.spec.block_size)
      return fail("groups: resident pages of {} tokens; host pages have {}", group.spec.block_size,
                  source.spec.block_size);
  }
  if (!has_pages)
    return fail("groups: a group of role {} without groups of {}", kPageSourceRole, kResidentRole);
  const std::int64_t least =
      ceil_div(config.max_model_len, static_cast<std::int32_t>(source.spec.block_size)) + 2;
  if (config.host_pool_num_blocks < least)
    return fail("{}: {}; one request of max_model_len needs {}", kHostBlocksKey,
                config.host_pool_num_blocks, least);
  return {};
}

}  // namespace

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::Scheduler(Scheduler&&) noexcept = default;
Scheduler& Scheduler::operator=(Scheduler&&) noexcept = default;
Scheduler::~Scheduler() = default;

// Checks in order of cost: single values, limits, combinations, the shape of groups, block sizes.
// With a connector the hash lookahead is off (beside_connector()).
Result<Scheduler> Scheduler::create(const EngineConfig& config,
                                    const std::vector<KVCacheGroupSpec>& groups,
                                    std::int64_t num_blocks, const KVTransfer& transfer,
                                    const SchedulerParts* parts) {
  if (num_blocks < 2)
    return fail("num_blocks: {}; the null block takes one, so expected at least 2", num_blocks);
  if (config.max_num_seqs < 1 || config.max_num_batched_tokens < 1 || config.max_model_len < 1)
    return fail("max_num_seqs, max_num_batched_tokens and max_model_len must be at least 1");
  // Before check_limits(): later checks need the profile.
  if (const auto profile = parse_engine(config.engine); !profile)
    return fail("engine: " + profile.error().message);
  LS_RETURN_IF_ERROR(check_limits(config, groups, num_blocks));
  // vLLM 0.22.1, config/vllm.py, _set_max_num_scheduled_tokens().
  if (config.spec_method == SpecMethod::draft_model &&
      engine_profile(config.engine).draft_slots == DraftSlots::of_max_num_seqs &&
      config.max_num_batched_tokens <= config.max_num_seqs)
    return fail("max_num_batched_tokens: {}; the draft model takes {} of them, max_num_seqs",
                config.max_num_batched_tokens, config.max_num_seqs);
  RunFacts facts = facts_of(config, groups);
  facts.traits.add_if(transfer.connector != nullptr, RunTrait::connector);
  LS_RETURN_IF_ERROR(supported(facts));
  LS_RETURN_IF_ERROR(check_host_pages(config, groups));
  const EngineConfig engine = transfer.connector == nullptr ? config : beside_connector(config);
  LS_ASSIGN_OR_RETURN(auto sizes, resolve_block_sizes(engine, groups));
  const SchedulerParts usual;
  const SchedulerParts& made_by = parts == nullptr ? usual : *parts;
  return Scheduler(made_by.scheduler(engine, groups, sizes, num_blocks, transfer));
}

// Takes all free blocks and frees them in the new order: the queue then has exactly that order.
void Scheduler::order_free_blocks(std::span<const BlockId> order) {
  BlockPool& pool = impl_->cache.pool();
  std::vector<BlockId> free(order.begin(), order.end());
  std::erase_if(free, [&](BlockId block) { return pool.ref_cnt(block) > 0; });  // sinks
  LS_CHECK(std::ssize(order) + 1 == pool.num_blocks() && std::ssize(free) == pool.num_free_blocks(),
           "an order of {} blocks, {} are free", order.size(), pool.num_free_blocks());
  std::vector<BlockId> taken;
  pool.get_new_blocks(std::ssize(free), taken);
  pool.free_blocks(free);
}

// vLLM refuses these requests before its scheduler sees them.
Result<RequestId> Scheduler::add_request(RequestSpec request) {
  const std::int64_t size = request.prompt.size();
  if (size < 1 || size > impl_->config.max_model_len)
    return fail("request {}: a prompt of {} tokens; expected 1 to max_model_len = {}", request.name,
                size, impl_->config.max_model_len);
  if (request.max_tokens < 1)
    return fail("request {}: max_tokens = {}; expected at least 1", request.name,
                request.max_tokens);
  return impl_->insert(std::move(request));
}

void Scheduler::abort_request(RequestId id) {
  if (!impl_->requests.has(id)) return;
  impl_->cancel(id);
}

void Scheduler::limit_blocks_in_use(std::int64_t num_blocks) {
  impl_->cache.pool().limit_blocks_in_use(num_blocks);
}

void Scheduler::set_pause_state(PauseState state) { impl_->pause_state = state; }

// Blocks that wait for an in-flight step count as in use, so the reset may fail even after all
// running requests were preempted.
bool Scheduler::reset_prefix_cache(bool preempts_running) {
  if (preempts_running) impl_->preempt_all_running();
  return impl_->cache.reset_prefix_cache();
}

const SchedulerOutput& Scheduler::schedule() {
  impl_->schedule();
  return impl_->output;
}

std::span<const StoppedRequest> Scheduler::update_from_output(const ModelOutput& output) {
  impl_->take_output(output);
  return impl_->stopped;
}

std::span<const StaleOutput> Scheduler::stale_outputs() const { return impl_->stale; }

// Of the step decided last: the back of the queue.
std::int32_t Scheduler::num_sampled_max(std::size_t row) const {
  const auto& rows = impl_->in_flight.back();
  LS_CHECK(row < rows.size(), "row {} of {} in flight", row, rows.size());
  return rows[row].samples ? 1 + rows[row].num_spec : 0;
}

// Held requests have finished: only their blocks are left.
bool Scheduler::has_unfinished_requests() const {
  return !impl_->running.empty() || !impl_->waiting.empty() ||
         (impl_->remote != nullptr && impl_->remote->any_passed_over());
}
std::int32_t Scheduler::num_steps_in_flight() const {
  return static_cast<std::int32_t>(impl_->in_flight.size());
}
std::span<const RequestId> Scheduler::running() const { return impl_->running; }
std::span<const RequestId> Scheduler::waiting() const { return impl_->waiting.in_order(); }
std::vector<SkippedRequest> Scheduler::skipped() const {
  std::vector<SkippedRequest> skipped;
  if (impl_->remote == nullptr || !impl_->remote->any_passed_over()) return skipped;
  for (const RequestQueue* queue : {&impl_->remote->holding, &impl_->remote->skipped})
    for (const RequestId id : queue->in_order()) {
      const Request& request = std::as_const(*impl_).at(id);
      skipped.push_back({id, request.status, impl_->remote->is_loading(id, request)});
    }
  return skipped;
}
// In the order of ids; the engine keeps a set.
std::optional<std::vector<RequestId>> Scheduler::deferred() const {
  if (impl_->remote == nullptr || !impl_->profile.holders_come_first) return std::nullopt;
  const std::set<RequestId>& deferred = impl_->remote->deferred;
  return std::vector<RequestId>(deferred.begin(), deferred.end());
}
// In the order in which they will be freed.
std::vector<BlockId> Scheduler::freed_late() const {
  std::vector<BlockId> blocks;
  if (impl_->remote == nullptr) return blocks;
  for (const RemoteCaches::FreedLate& freed : impl_->remote->freed_late)
    blocks.insert(blocks.end(), freed.blocks.begin(), freed.blocks.end());
  return blocks;
}
std::vector<HeldRequest> Scheduler::held() const {
  std::vector<HeldRequest> held;
  if (impl_->remote == nullptr) return held;
  for (const auto& [id, how] : impl_->remote->held) held.push_back({id, how.is_loading});
  return held;
}
std::int64_t Scheduler::num_free_blocks() const { return impl_->cache.pool().num_free_blocks(); }
std::int64_t Scheduler::num_free_host_blocks() const {
  HostPageCoordinator* const pages = impl_->cache.host_pages();
  return pages == nullptr ? 0 : pages->host_pool().num_free_blocks();
}
bool Scheduler::has_pages_to_send() const {
  return impl_->cache.host_pages() != nullptr && impl_->cache.host_pages()->has_pages_to_send();
}
bool Scheduler::has_pages_under_way() const {
  return impl_->cache.host_pages() != nullptr && impl_->cache.host_pages()->has_pending_work();
}
const BlockPool& Scheduler::pool() const { return impl_->cache.pool(); }
bool Scheduler::is_cached(BlockId block) const { return impl_->cache.can_hit(block); }
std::int32_t Scheduler::ref_cnt(BlockId block) const { return impl_->cache.pool().ref_cnt(block); }
std::optional<CachedBlock> Scheduler::cached_as(BlockId block) const {
  if (!is_cached(block)) return std::nullopt;
  const PrefixCache& cache = impl_->cache.pool().cache();
  return CachedBlock{cache.key_of(block), cache.group_of(block)};
}
// A loop over cached_as(); a caller keeps the memory.
void Scheduler::all_cached(IdVector<BlockId, std::optional<CachedBlock>>& cached) const {
  if (!pool().is_caching()) return void(std::ranges::fill(cached, std::nullopt));
  for (std::int32_t block = 0; block < std::ssize(cached); ++block)
    cached[BlockId{block}] = cached_as(BlockId{block});
}
bool Scheduler::is_cached_as(BlockId block, const CachedBlock& content) const {
  return is_cached(block) && impl_->cache.pool().cache().has_key(block, content.key, content.group);
}
std::int32_t Scheduler::num_cached_tokens(BlockId block) const {
  return is_cached(block) ? impl_->cache.pool().cache().num_tokens_of(block) : 0;
}
BlockId Scheduler::find_cached(const CachedBlock& content) const {
  const BlockPool& pool = impl_->cache.pool();
  return pool.is_caching() ? pool.cache().find(content.key, content.group) : kNullBlock;
}
std::span<const BlockId> Scheduler::block_table(RequestId request, std::int32_t group) const {
  const std::vector<GroupBlocks>& groups = std::as_const(*impl_).at(request).groups;
  LS_CHECK(group >= 0 && group < std::ssize(groups), "group {} of {}", group, groups.size());
  return groups[group].blocks;
}
std::span<const BlockKey> Scheduler::block_keys(RequestId request) const {
  return std::as_const(*impl_).at(request).hashes.keys();
}
std::vector<CacheEvent> Scheduler::take_cache_events() {
  CacheEventLog* events = impl_->cache.pool().events();
  return events == nullptr ? std::vector<CacheEvent>{} : events->take();
}
CacheCounters Scheduler::take_cache_counters() { return impl_->cache.pool().take_counters(); }
std::string_view Scheduler::name(RequestId request) const {
  return std::as_const(*impl_).at(request).name;
}
RequestStatus Scheduler::status(RequestId request) const {
  return std::as_const(*impl_).at(request).status;
}
std::int64_t Scheduler::num_prompt_tokens(RequestId request) const {
  return std::as_const(*impl_).at(request).num_prompt_tokens();
}
std::int64_t Scheduler::num_tokens(RequestId request) const {
  return std::as_const(*impl_).at(request).num_tokens();
}
std::int64_t Scheduler::num_computed_tokens(RequestId request) const {
  return std::as_const(*impl_).at(request).num_computed_tokens;
}
std::int32_t Scheduler::num_spec_tokens() const { return impl_->config.num_spec_tokens; }
std::span<const std::int32_t> Scheduler::drafts(RequestId request) const {
  return std::as_const(*impl_).at(request).spec_tokens;
}
std::int32_t Scheduler::token(RequestId request, std::int64_t position) const {
  return std::as_const(*impl_).at(request).tokens[position];
}
std::int64_t Scheduler::scheduler_block_size() const {
  return impl_->block_sizes.scheduler_block_size;
}
std::int64_t Scheduler::hash_block_size() const { return impl_->block_sizes.hash_block_size; }

// The output of a step. Source of the rules: vllm/v1/core/sched/scheduler.py, update_from_output().

// The order is the engine's: deferred frees, failed loads, rows, errors, completed transfers, new
// drafts. Rows of requests whose load failed count as empty.
void Scheduler::Impl::take_output(const ModelOutput& model) {
  const KVConnectorOutput& report = model.kv_connector_output;
  LS_CHECK(report.empty() || remote != nullptr, "a report of a connector, and there is none");
  LS_CHECK(!in_flight.empty() ||
               (remote != nullptr && !config.async_scheduling && model.token_ends.empty()),
           "no step in flight");
  std::vector<InFlightRow> rows;
  if (!in_flight.empty()) {
    rows = std::move(in_flight.front());
    in_flight.pop_front();
  }
  LS_CHECK(model.token_ends.size() == rows.size(), "{} rows of tokens for {} scheduled requests",
           model.token_ends.size(), rows.size());
  stopped.clear();
  stale.clear();
  if (remote != nullptr && !rows.empty()) step_is_over();
  // Requests whose output is void: they sampled from tokens that a load did not bring.
  std::vector<RequestId> voided = take_failed_loads(report);
  if (!report.invalid_block_ids.empty()) {
    const std::vector<RequestId> lost = take_invalid_blocks(report, rows);
    std::ranges::copy_if(lost, std::back_inserter(voided), [&](RequestId id) {
      return std::ranges::find(voided, id) == voided.end();
    });
  }
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool is_void = !voided.empty() && std::ranges::find(voided, rows[i].id) != voided.end();
    LS_CHECK(model.token_ends[i] >= begin && model.token_ends[i] <= model.tokens.size(),
             "row {} has tokens [{}, {}) of {}", i, begin, model.token_ends[i],
             model.tokens.size());
    const std::uint32_t size = is_void ? 0 : model.token_ends[i] - begin;
    take_row(rows[i], std::span(model.tokens).subspan(begin, size));
    begin = model.token_ends[i];
  }
  // Once per output, not per request: `running` may be long.
  if (!stopped.empty())
    std::erase_if(running, [&](RequestId id) { return at(id).status == RequestStatus::finished; });
  if (!voided.empty() && remote->fails_requests) fail_requests(std::move(voided));
  if (!report.empty()) take_transfers(report);
  update_drafts(model, rows);
  spare_rows.push_back(std::move(rows));
}

// Appends sampled tokens until one ends the request; later ones are dropped. True: it ends, with
// `reason`. num_kept: tokens appended. Source: v1/core/sched/utils.py, check_stop(). Stop tokens
// win over length, length over repetition.
bool Scheduler::Impl::append_tokens(Request& request, std::span<const std::int32_t> tokens,
                                    FinishReason& reason, std::size_t& num_kept) {
  bool stops = false;
  num_kept = 0;
  for (const std::int32_t token : tokens) {
    request.tokens.append(token);
    ++num_kept;
    // Older releases let nothing end a request before min_tokens.
    if (request.has_min_tokens && profile.min_tokens_hold_every_end &&
        request.num_output_tokens() < request.min_tokens)
      continue;
    if (request.ends_with(token)) {
      reason = FinishReason::stop;
      stops = true;
    } else if (request.num_tokens() >= config.max_model_len ||
               request.num_output_tokens() >= request.max_tokens) {
      reason = FinishReason::length;
      stops = true;
    } else if (request.detects_repetition && request.num_output_tokens() >= request.min_tokens &&
               request.repeats_itself()) {
      reason = FinishReason::repetition;
      stops = true;
    }
    if (stops) break;
  }
  if (config.enable_prefix_caching)
    request.hashes.extend(hash_rule, request.tokens, request.cache_salt, request.keys);
  return stops;
}

// Processes one row of the output. A row of a request that has ended is dropped, although the id
// may belong to a new request: the generation differs. A row decided before its request's last
// preemption is stale.
void Scheduler::Impl::take_row(const InFlightRow& row, std::span<const std::int32_t> tokens) {
  if (requests.generation(row.id) != row.generation) return;  // ended since
  const Request& request = at(row.id);
  const bool is_stale =
      config.async_scheduling && !tokens.empty() && request.num_preemptions != row.num_preemptions;
  const std::int32_t num_before = is_stale ? request.num_tokens() : 0;
  update_row(row, tokens);
  if (is_stale) stale.push_back({row.id, request.num_tokens() - num_before});
}

// Applies a row to its request: counters, rejected drafts, tokens, end. Stale output delivers its
// tokens and changes no counter that the preemption has reset.
void Scheduler::Impl::update_row(const InFlightRow& row, std::span<const std::int32_t> tokens) {
  Request& request = at(row.id);
  request.num_in_flight_tokens -= row.num_tokens;
  LS_CHECK(request.num_in_flight_tokens >= 0, "{} has {} tokens in flight", request.name,
           request.num_in_flight_tokens);
  const bool is_stale = request.num_stale_tokens > 0;
  if (is_stale) request.num_stale_tokens -= row.num_tokens;
  // The step has written the encoder's rows to blocks, so its cache may drop them.
  if (encoder && request.num_computed_tokens > 0 && !(is_stale && request.drops_stale_output))
    encoder->let_go(request);
  // A prefill chunk samples nothing.
  if (tokens.empty() || (is_stale && request.drops_stale_output)) return;
  const auto num_sampled = static_cast<std::int32_t>(tokens.size());
  if (row.num_spec > 0 && !is_stale) take_back_rejected(request, row.num_spec - (num_sampled - 1));
  // Releases that count placeholders drop outputs one by one after a reset.
  if (request.num_outputs_to_drop > 0) {
    --request.num_outputs_to_drop;
    return;
  }
  const bool was_running = request.status == RequestStatus::running;
  FinishReason reason{};
  std::size_t num_kept = 0;
  const bool stops = append_tokens(request, tokens, reason, num_kept);
  if (!is_stale)
    count_output(request, num_sampled, static_cast<std::int32_t>(num_kept), was_running);
  if (!stops) return;
  stopped.push_back({row.id, reason});
  // A preempted request can end by its stale output: it then leaves its queue.
  if (!was_running) {
    waiting.remove(row.id, request);
    if (remote != nullptr) remote->remove(row.id, request);
  }
  retire(row.id);
}

// Subtracts rejected drafts: they were counted as computed when the step was scheduled.
void Scheduler::Impl::take_back_rejected(Request& request, std::int32_t num_rejected) {
  if (request.num_computed_tokens > 0) request.num_computed_tokens -= num_rejected;
  if (request.num_output_placeholders > 0) request.num_output_placeholders -= num_rejected;
}

// Subtracts the sampled tokens from the placeholders, and publishes the blocks that the output
// confirms. Releases before 0.33.0 publish only with asynchronous scheduling, up to the
// placeholders.
void Scheduler::Impl::count_output(Request& request, std::int32_t num_sampled,
                                   std::int32_t num_kept, bool was_running) {
  if (!profile.publishes_with_output) {
    if (!config.async_scheduling) return;
    request.num_output_placeholders -= num_kept;
    LS_CHECK(request.num_output_placeholders >= 0, "request {} has {} placeholders", request.name,
             request.num_output_placeholders);
    if (was_running)
      cache.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders);
    return;
  }
  const bool had_placeholders = request.num_output_placeholders > 0;
  request.num_computed_tokens -=
      num_sampled - num_kept;  // tokens that a stop cut off do not count as computed
  if (had_placeholders) request.num_output_placeholders -= num_sampled;
  LS_CHECK(request.num_output_placeholders >= 0, "request {} has {} placeholders", request.name,
           request.num_output_placeholders);
  // Without drafts and placeholders the allocation has published these blocks already.
  if (was_running && (had_placeholders || config.num_spec_tokens > 0))
    cache.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens);
}

// Stores the drafts that the step proposed, for the next step. Drafts after a prefill chunk are
// dropped: the next token is known.
void Scheduler::Impl::update_drafts(const ModelOutput& model, std::span<const InFlightRow> rows) {
  if (model.draft_ends.empty()) return;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (requests.generation(rows[i].id) != rows[i].generation) continue;
    Request& request = at(rows[i].id);
    const std::uint32_t begin = i == 0 ? 0 : model.draft_ends[i - 1];
    LS_CHECK(begin <= model.draft_ends[i] && model.draft_ends[i] <= model.draft_tokens.size(),
             "row {} has drafts [{}, {}) of {}", i, begin, model.draft_ends[i],
             model.draft_tokens.size());
    request.spec_tokens.clear();
    if (!request.is_prefill_chunk)
      request.spec_tokens.assign(model.draft_tokens.begin() + begin,
                                 model.draft_tokens.begin() + model.draft_ends[i]);
  }
}

// Ends a request: frees its blocks unless a connector keeps them. The next decision reports the
// end.
void Scheduler::Impl::retire(RequestId id) {
  Request& request = at(id);
  if (remote != nullptr) remote->prefilling.erase(id);
  if (encoder) encoder->let_go(request);
  // The connector is notified while the request still has its blocks and its old status.
  const bool keeps = keeps_blocks(id);
  request.status = RequestStatus::finished;
  if (!keeps) give_back(request);
  LS_CHECK(keeps || !holds_blocks(id), "{} has finished and still holds blocks", request.name);
  requests.end(id);
  finished.push_back(id);
}

// Erases a request whose end has been reported; a connector that keeps its blocks delays that. The
// id is then free for another request.
void Scheduler::Impl::forget(RequestId id) {
  if (remote != nullptr) {
    const auto held = remote->held.find(id);
    if (held != remote->held.end()) {
      held->second.is_reported = true;
      return;
    }
  }
  LS_CHECK(at(id).status == RequestStatus::finished, "{} is forgotten before its end", at(id).name);
  requests.erase(id);
}

}  // namespace lockstep
