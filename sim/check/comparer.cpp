#include "sim/check/comparer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"

namespace lockstep {

// The bytes of one state tensor within its page.
static std::span<const std::uint8_t> bytes_in_page(std::span<const std::uint8_t> page,
                                                   const ModelLayer& layer, std::size_t state) {
  return page.subspan(layer.state_offset(state), layer.state_bytes(state));
}

Checked StateChecker::check(const StepProgram& program, const StepExpectation& expected,
                            const StepReadback& readback) {
  LS_CHECK(expected.states_before.size() == program.state_updates.size(), "{} of {} updates",
           expected.states_before.size(), program.state_updates.size());
  readback_ = &readback;
  updates_.clear();
  std::size_t output = 0;
  for (std::size_t i = 0; i < program.state_updates.size(); ++i) {
    const StateUpdate& update = program.state_updates[i];
    updates_.push_back({.of = &update,
                        .before = &expected.states_before[i],
                        .words = expected.states_before[i].target,
                        .next_output = output,
                        .contents = std::span(program.contents).subspan(update.first_token)});
    const std::int64_t reads = update.num_outputs_read();
    tokens_read_ += reads;
    tokens_left_out_ += update.num_tokens - reads;
    // The order of StepReadback::state_outputs.
    for (const ModelLayer& layer : model_.layers_of(update.group))
      for (const StateNumbers& of : layer.state_numbers)
        output += static_cast<std::size_t>(reads * of.num_outputs());
  }
  if (readback.state_outputs.size() != output)
    return fail("the backend read back {} outputs of states; expected {}",
                readback.state_outputs.size(), output);
  // Updates of one row and group are adjacent: StateUpdate.
  for (std::size_t first = 0; first < updates_.size();) {
    std::size_t last = first + 1;
    const auto goes_on = [&](const StateUpdate& next) {
      return next.row == updates_[first].of->row && next.group == updates_[first].of->group;
    };
    while (last < updates_.size() && goes_on(*updates_[last].of)) ++last;
    LS_RETURN_UNLESS_FINE(check_chain(Chain(updates_).subspan(first, last - first)));
    first = last;
  }
  // The step stored blocks whose bytes were unknown until now. Their host blocks get them here,
  // before check_host_tier() compares them.
  for (const HostTransfer& store : program.stores)
    if (model_.is_state_group(store.group))
      model_.settle_store(store.group, store.block, store.host);
  return {};
}

Checked StateChecker::check_chain(Chain chain) {
  const std::int32_t group = chain.front().of->group;
  for (const ModelLayer& layer : model_.layers_of(group)) {
    std::vector<std::vector<std::uint8_t>> pages;
    for (const Update& update : chain) {
      LS_ASSIGN_OR_RETURN(pages.emplace_back(), backend_.read_page({.tensor = layer.memory.tensor,
                                                                    .block = update.of->target}));
    }
    for (std::size_t state = 0; state < layer.state_numbers.size(); ++state)
      LS_RETURN_UNLESS_FINE(layer.state_numbers[state].rule == StateRule::convolution
                                ? check_inputs(chain, layer, state, pages)
                                : check_recurrence(chain, layer, state, pages));
  }
  // Only a chain without a divergence reaches this point, so the model never stores wrong bytes.
  for (Update& update : chain)
    model_.settle_state(
        group, update.of->target,
        std::make_shared<const std::vector<std::uint64_t>>(std::move(update.words)));
  return {};
}

// A null `before` with a known state in the block: another chain of this step wrote it and was
// settled before this one. A block without a settled state means a start from zeros.
std::span<const std::uint8_t> StateChecker::bytes_before(const StateWords& before, BlockId block,
                                                         const ModelLayer& layer,
                                                         std::size_t state) const {
  if (before != nullptr) return bytes_of_state(*before, layer, state);
  const StateWords& settled = model_.block(block).state.words;
  if (block == kNullBlock || settled == nullptr) return {};
  return bytes_of_state(*settled, layer, state);
}

Checked StateChecker::check_inputs(Chain chain, const ModelLayer& layer, std::size_t state,
                                   std::span<const std::vector<std::uint8_t>> pages) {
  const StateNumbers& of = layer.state_numbers[state];
  KeptInputs kept;
  std::size_t head = 0;  // update with the verified tokens, which the draft updates follow
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Update& update = chain[i];
    const auto num_tokens = static_cast<std::size_t>(update.of->num_tokens);
    if (!update.of->is_draft) {
      head = i;
      // The first update starts from the stored inputs, at the row that follows the accepted
      // drafts. A later one starts from the inputs that the previous update keeps at row 0.
      kept = i == 0 ? KeptInputs{bytes_before(update.before->conv_source, update.of->conv_source,
                                              layer, state),
                                 update.of->conv_offset}
                    : KeptInputs{bytes_of_state(chain[i - 1].words, layer, state), 0};
      const std::size_t with_drafts = num_tokens + static_cast<std::size_t>(update.of->num_drafts);
      // The update also keeps the inputs of its drafts. The next step picks the row at which it
      // resumes by the number of accepted drafts (conv_offset), so drafts need no copies.
      keep_inputs(of, kept, update.contents.first(with_drafts), update.of->num_tokens,
                  bytes_of_state(update.words, layer, state));
    }
    const auto should = bytes_of_state(std::as_const(update.words), layer, state);
    const auto is = bytes_in_page(pages[i], layer, state);
    // A draft's update changes no inputs: its block must still hold its earlier bytes.
    if (const auto at = std::ranges::mismatch(should, is); at.in1 != should.end()) {
      const std::int64_t item = itemsize_bytes(of.dtype);
      const std::int64_t element = (at.in1 - should.begin()) / item;
      return diagnosis_.state(*update.of, layer, state, element,
                              number_at(should.data() + element * item, of.dtype),
                              number_at(is.data() + element * item, of.dtype), 0);
    }
    counts_.state_numbers_checked += layer.state_bytes(state) / itemsize_bytes(of.dtype);
    const auto first =
        static_cast<std::size_t>(update.of->first_token - chain[head].of->first_token);
    // A draft's output depends on the tokens and drafts before it, from the head's first token.
    for (std::int32_t token = 0; token < update.of->num_tokens; ++token)
      if (update.of->reads_output(token))
        LS_RETURN_UNLESS_FINE(check_outputs(
            update, layer, state, token,
            convolve_last(
                of, kept,
                chain[head].contents.first(first + static_cast<std::size_t>(token) + 1))));
  }
  return {};
}

Checked StateChecker::check_recurrence(Chain chain, const ModelLayer& layer, std::size_t state,
                                       std::span<const std::vector<std::uint8_t>> pages) {
  const StateNumbers& of = layer.state_numbers[state];
  const std::int64_t item = itemsize_bytes(of.dtype);
  const Update& start = chain.front();
  std::int64_t num_tokens = 0;
  for (const Update& update : chain) num_tokens += update.of->num_tokens;
  // Kernels advance several tokens in pieces (chunked scan), but drafts token by token: the two
  // forms have different rounding errors.
  Recurrence recurrence(of, bytes_before(start.before->source, start.of->source, layer, state),
                        num_tokens > 1 && start.of->num_drafts == 0);
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Update& update = chain[i];
    std::vector<std::pair<std::int32_t, Bounded>> outputs;  // by token
    for (std::int32_t token = 0; token < update.of->num_tokens; ++token) {
      recurrence.advance(update.contents[static_cast<std::size_t>(token)]);
      if (update.of->reads_output(token)) outputs.emplace_back(token, recurrence.outputs());
    }
    // Storing a state ends a piece of the chunked form.
    recurrence.end_piece();
    const auto is = bytes_in_page(pages[i], layer, state);
    for (std::int64_t e = 0; e < layer.state_bytes(state) / item; ++e) {
      // The comparison is written so that NaN, which compares false, is a divergence.
      const double found = number_at(is.data() + e * item, of.dtype);
      if (std::abs(found - recurrence.value(e)) <= recurrence.bound(e)) continue;
      return diagnosis_.state(*update.of, layer, state, e, recurrence.value(e), found,
                              recurrence.bound(e));
    }
    // Adopts the backend's bytes: invariant (2) of StateChecker.
    std::ranges::copy(is, bytes_of_state(update.words, layer, state).begin());
    counts_.state_numbers_checked += layer.state_bytes(state) / itemsize_bytes(of.dtype);
    for (const auto& [token, expected] : outputs)
      LS_RETURN_UNLESS_FINE(check_outputs(update, layer, state, token, expected));
  }
  return {};
}

Checked StateChecker::check_outputs(Update& update, const ModelLayer& layer, std::size_t state,
                                    std::int32_t token, const Bounded& expected) {
  for (std::size_t e = 0; e < expected.values.size(); ++e) {
    const double found = readback_->state_outputs[update.next_output++];
    if (std::abs(found - expected.values[e]) <= expected.bounds[e]) continue;
    return diagnosis_.state_output(*update.of, layer, state, token, static_cast<std::int64_t>(e),
                                   expected.values[e], found, expected.bounds[e]);
  }
  counts_.state_outputs_checked += static_cast<std::int64_t>(expected.values.size());
  return {};
}

// Pages per fingerprint call; bounds page_ids_ and fingerprints_ for pools with millions of pages.
constexpr std::size_t kPagesAtATime = 4096;

// Refuses a readback with missing parts. That is a programming error of the backend, so it is an
// Error and not a divergence.
static Result<void> check_sizes(const StepProgram& program, const StepReadback& readback,
                                std::size_t num_groups) {
  const bool sound = readback.tables.size() == num_groups &&
                     readback.table_ends.size() == num_groups &&
                     readback.slot_mappings.size() == num_groups &&
                     readback.digests.size() == program.probes.size();
  if (!sound)
    return fail(
        "the backend read back {} tables, {} slot mappings and {} digests; expected {}, {} and {}",
        readback.tables.size(), readback.slot_mappings.size(), readback.digests.size(), num_groups,
        num_groups, program.probes.size());
  return {};
}

Comparer::Comparer(const BackendConfig& config, MemoryModel& model, Worker& worker,
                   Backend& backend, std::int64_t untouched_pages, RunSummary& counts)
    : model_(model),
      worker_(worker),
      backend_(backend),
      diagnosis_(config, model, worker, backend),
      states_(model, backend, diagnosis_, counts),
      untouched_pages_(untouched_pages),
      counts_(counts) {}

Checked Comparer::check_reused(const StepProgram& program, std::span<const RequestId> requests) {
  diagnosis_.begin_step(program, requests);
  pages_.clear();
  for (const PoisonBlock& poison : program.poison) model_.pages_of(poison.block, pages_);
  std::ranges::sort(pages_);
  // Blocks share pages where a layout keeps K and V of all blocks apart: rule (7).
  pages_.erase(std::unique(pages_.begin(), pages_.end()), pages_.end());
  return check_pages(Phase::reuse, pages_, nullptr);
}

Checked Comparer::check_step(const StepProgram& program, std::span<const RequestId> requests,
                             const StepExpectation& expected, const ProbePlanner& planner,
                             const StepReadback& readback, StateHashChain& chain) {
  diagnosis_.begin_step(program, requests);
  const auto num_groups = static_cast<std::size_t>(model_.num_groups());
  LS_RETURN_IF_ERROR(check_sizes(program, readback, num_groups));
  // The backend's own memory checker comes first: its report names the faulty access, while the
  // later comparisons only show the consequences.
  if (!readback.reports.empty()) return diagnosis_.report(readback.reports.front());
  LS_RETURN_UNLESS_FINE(check_tables(program, requests, readback));
  LS_RETURN_UNLESS_FINE(check_slots(expected, readback, chain));
  // Settles the states, without which pages that hold them have no image. So it precedes
  // check_pages().
  if (model_.has_real_states()) LS_RETURN_UNLESS_FINE(states_.check(program, expected, readback));
  LS_RETURN_UNLESS_FINE(check_pages(Phase::page_written, model_.written_pages(), &chain));
  LS_RETURN_UNLESS_FINE(check_host_tier(chain));
  LS_RETURN_UNLESS_FINE(check_digests(program, planner, readback));
  LS_RETURN_UNLESS_FINE(check_outputs(program, planner, readback));
  // Untouched pages stay out of the hash chain: how many are compared is an option of the run.
  return check_pages(Phase::page_untouched, next_untouched(), nullptr);
}

Checked Comparer::check_tables(const StepProgram& program, std::span<const RequestId> requests,
                               const StepReadback& readback) {
  for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
    const auto group = static_cast<std::size_t>(g);
    const std::span<const std::int32_t> entries(readback.tables[group]);
    LS_CHECK(readback.table_ends[group].size() == program.rows.size(), "{} rows read, {} scheduled",
             readback.table_ends[group].size(), program.rows.size());
    std::size_t begin = 0;
    for (std::size_t row = 0; row < program.rows.size(); ++row) {
      // Rows are concatenated; row i ends at table_ends[g][i].
      const std::size_t end = readback.table_ends[group][row];
      const auto found = entries.subspan(begin, end - begin);
      begin = end;
      const std::vector<BlockId>& table = worker_.at(requests[row]).tables[group];
      counts_.table_entries_checked += static_cast<std::int64_t>(table.size());
      const auto same = [](BlockId a, std::int32_t b) { return index_of(a) == b; };
      if (!std::ranges::equal(table, found, same)) return diagnosis_.table(row, g, found);
    }
  }
  return {};
}

Checked Comparer::check_slots(const StepExpectation& expected, const StepReadback& readback,
                              StateHashChain& chain) {
  for (std::int32_t g = 0; g < model_.num_groups(); ++g) {
    // States are addressed by blocks, not by slots.
    if (model_.is_state_group(g)) continue;
    const std::vector<Slot>& slots = expected.slot_mappings[g];
    const std::vector<Slot>& found = readback.slot_mappings[g];
    LS_CHECK(slots.size() == found.size(), "{} slots read, {} expected", found.size(),
             slots.size());
    counts_.slots_checked += static_cast<std::int64_t>(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] != found[i]) return diagnosis_.slot(g, i, slots[i], found[i]);
      chain.add(static_cast<std::uint64_t>(slots[i]));
    }
  }
  return {};
}

Checked Comparer::check_digests(const StepProgram& program, const ProbePlanner& planner,
                                const StepReadback& readback) {
  for (std::size_t i = 0; i < program.probes.size(); ++i) {
    const ProbeExpectation& expected = planner.probes()[i];
    if (expected.digest == readback.digests[i]) continue;
    return diagnosis_.digest(program.probes[i], expected.request, expected.digest,
                             readback.digests[i]);
  }
  return {};
}

Checked Comparer::check_outputs(const StepProgram& program, const ProbePlanner& planner,
                                const StepReadback& readback) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < program.queries.size(); ++i) {
    const QueryExpectation& expected = planner.queries()[i];
    LS_CHECK(at + expected.output.size() <= readback.outputs.size(), "{} floats read",
             readback.outputs.size());
    for (std::size_t e = 0; e < expected.output.size(); ++e, ++at) {
      const double found = readback.outputs[at];
      // An infinite expected value must not pass as equal to an infinite output.
      if (std::isfinite(found) && std::abs(found - expected.output[e]) <= expected.tolerance)
        continue;
      return diagnosis_.output(program.queries[i], expected.request, e, expected.output[e], found,
                               expected.tolerance);
    }
    counts_.outputs_checked += static_cast<std::int64_t>(expected.output.size());
  }
  LS_CHECK(at == readback.outputs.size(), "{} floats read, {} expected", readback.outputs.size(),
           at);
  return {};
}

Checked Comparer::check_pages(Phase phase, std::span<const ModelPage> pages,
                              StateHashChain* chain) {
  for (std::size_t first = 0; first < pages.size(); first += kPagesAtATime) {
    const auto part = pages.subspan(first, std::min(kPagesAtATime, pages.size() - first));
    page_ids_.clear();
    for (const ModelPage& page : part)
      page_ids_.push_back({.tensor = page.tensor, .block = static_cast<BlockId>(page.index)});
    fingerprints_.assign(part.size(), {});
    LS_RETURN_IF_ERROR(backend_.fingerprint_pages(page_ids_, fingerprints_));
    for (std::size_t i = 0; i < part.size(); ++i) {
      // Cheap: the model maintains its sums as rows are written.
      const PageSum expected = model_.fingerprint(part[i]);
      if (expected.a != fingerprints_[i].a || expected.b != fingerprints_[i].b)
        return diagnosis_.page(phase, part[i]);
      if (chain != nullptr) {
        chain->add(expected.a);
        chain->add(expected.b);
      }
      ++counts_.pages_checked;
      counts_.bytes_checked += model_.page_size_bytes(part[i].tensor);
    }
  }
  return {};
}

// A pool with fewer pages than untouched_pages is compared whole once per step. Written pages use
// up their turn: check_pages() has just compared them.
std::span<const ModelPage> Comparer::next_untouched() {
  pages_.clear();
  const std::int64_t total = model_.num_tensors() * model_.num_blocks();
  const auto written = model_.written_pages();
  const std::int64_t count = std::min(untouched_pages_, total);
  for (std::int64_t i = 0; i < count; ++i, rotation_ = (rotation_ + 1) % total) {
    const ModelPage page{static_cast<std::int32_t>(rotation_ / model_.num_blocks()),
                         static_cast<std::int32_t>(rotation_ % model_.num_blocks())};
    // REQUIRES: written_pages() is sorted, which MemoryModel guarantees.
    if (!std::ranges::binary_search(written, page)) pages_.push_back(page);
  }
  return pages_;
}

Checked Comparer::check_all_pages() {
  pages_.clear();
  for (std::int32_t t = 0; t < model_.num_tensors(); ++t)
    for (std::int32_t p = 0; p < model_.num_blocks(); ++p) pages_.push_back({t, p});
  LS_RETURN_UNLESS_FINE(check_pages(Phase::page_final, pages_, nullptr));
  std::vector<HostBlockId> hosts;
  for (std::int32_t h = 0; h < model_.num_host_blocks(); ++h) hosts.push_back(HostBlockId{h});
  return check_hosts(hosts, nullptr);
}

// Host blocks that the step stored to are compared again if their turn comes in the rotation. That
// costs little, since only a few host blocks take part per step.
Checked Comparer::check_host_tier(StateHashChain& chain) {
  LS_RETURN_UNLESS_FINE(check_hosts(model_.written_hosts(), &chain));
  std::vector<HostBlockId> next;
  const std::int64_t total = model_.num_host_blocks();
  for (std::int64_t i = 0; i < std::min(untouched_pages_, total); ++i) {
    next.push_back(static_cast<HostBlockId>(host_rotation_));
    host_rotation_ = (host_rotation_ + 1) % total;
  }
  return check_hosts(next, nullptr);
}

Checked Comparer::check_hosts(std::span<const HostBlockId> hosts, StateHashChain* chain) {
  if (hosts.empty()) return {};
  fingerprints_.assign(hosts.size(), {});
  LS_RETURN_IF_ERROR(backend_.fingerprint_host_blocks(hosts, fingerprints_));
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const PageSum& expected = model_.host_block(hosts[i]).sum;
    if (expected.a != fingerprints_[i].a || expected.b != fingerprints_[i].b)
      return diagnosis_.host_block(hosts[i]);
    if (chain != nullptr) {
      chain->add(expected.a);
      chain->add(expected.b);
    }
    ++counts_.host_blocks_checked;
    counts_.host_bytes_checked += model_.host_block_bytes();
  }
  return {};
}

}  // namespace lockstep
