#include "sim/check/state_checker.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

std::span<const std::uint8_t> bytes_in_page(std::span<const std::uint8_t> page,
                                            const ModelLayer& layer, std::size_t state) {
  const StateLayout& at = layer.layout.states[state];
  return page.subspan(at.offset_bytes, at.num_elements * at.itemsize_bytes);
}

}  // namespace

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
                        .first_output = output,
                        .contents = std::span(program.contents).subspan(update.first_token)});
    for (const ModelLayer& layer : model_.layers_of(update.group))
      for (const StateNumbers& of : layer.state_numbers)
        output += static_cast<std::size_t>(of.num_outputs());
  }
  if (readback.state_outputs.size() != output)
    return fail(fmt::format("the backend read back {} outputs of states; expected {}",
                            readback.state_outputs.size(), output));
  for (std::size_t first = 0; first < updates_.size();) {
    std::size_t last = first + 1;
    const auto goes_on = [&](const StateUpdate& next) {
      return next.row == updates_[first].of->row && next.group == updates_[first].of->group;
    };
    while (last < updates_.size() && goes_on(*updates_[last].of)) ++last;
    LS_RETURN_UNLESS_FINE(check_chain(Chain(updates_).subspan(first, last - first)));
    first = last;
  }
  for (const HostTransfer& store : program.stores)
    if (model_.is_state_group(store.group))
      model_.settle_store(store.group, store.block, store.host);
  return {};
}

Checked StateChecker::check_chain(Chain chain) {
  const std::int32_t group = chain.front().of->group;
  std::size_t output = 0;  // behind an update's first one
  for (const ModelLayer& layer : model_.layers_of(group)) {
    std::vector<std::vector<std::uint8_t>> pages;
    for (const Update& update : chain) {
      LS_ASSIGN_OR_RETURN(
          pages.emplace_back(),
          backend_.read_page({.tensor = layer.layout.tensor_index, .block = update.of->target}));
    }
    for (std::size_t state = 0; state < layer.state_numbers.size(); ++state) {
      const StateNumbers& of = layer.state_numbers[state];
      LS_RETURN_UNLESS_FINE(of.rule == StateRule::convolution
                                ? check_inputs(chain, layer, state, pages, output)
                                : check_recurrence(chain, layer, state, pages, output));
      output += static_cast<std::size_t>(of.num_outputs());
    }
  }
  for (Update& update : chain)
    model_.settle_state(
        group, update.of->target,
        std::make_shared<const std::vector<std::uint64_t>>(std::move(update.words)));
  return {};
}

// The result of another chain of the step, if it is known.
std::span<const std::uint8_t> StateChecker::bytes_before(const StateWords& before, BlockId block,
                                                         const ModelLayer& layer,
                                                         std::size_t state) const {
  if (before != nullptr) return bytes_of_state(*before, layer, state);
  const StateWords& settled = model_.block(block).state.words;
  if (block == kNullBlock || settled == nullptr) return {};
  return bytes_of_state(*settled, layer, state);
}

Checked StateChecker::check_inputs(Chain chain, const ModelLayer& layer, std::size_t state,
                                   std::span<const std::vector<std::uint8_t>> pages,
                                   std::size_t output) {
  const StateNumbers& of = layer.state_numbers[state];
  KeptInputs kept;
  std::size_t head = 0;  // the update that the drafts behind it belong to
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Update& update = chain[i];
    const auto num_tokens = static_cast<std::size_t>(update.of->num_tokens);
    if (!update.of->is_draft) {
      head = i;
      kept = i == 0 ? KeptInputs{bytes_before(update.before->conv_source, update.of->conv_source,
                                              layer, state),
                                 update.of->conv_offset}
                    : KeptInputs{bytes_of_state(chain[i - 1].words, layer, state), 0};
      const std::size_t with_drafts = num_tokens + static_cast<std::size_t>(update.of->num_drafts);
      keep_inputs(of, kept, update.contents.first(with_drafts), update.of->num_tokens,
                  bytes_of_state(update.words, layer, state));
    }
    const auto should = bytes_of_state(std::as_const(update.words), layer, state);
    const auto is = bytes_in_page(pages[i], layer, state);
    if (const auto at = std::ranges::mismatch(should, is); at.in1 != should.end()) {
      const std::int64_t item = itemsize_bytes(of.dtype);
      const std::int64_t element = (at.in1 - should.begin()) / item;
      return diagnosis_.state(*update.of, layer, state, element,
                              number_at(should.data() + element * item, of.dtype),
                              number_at(is.data() + element * item, of.dtype), 0);
    }
    counts_.state_numbers_checked += layer.layout.states[state].num_elements;
    const auto first =
        static_cast<std::size_t>(update.of->first_token - chain[head].of->first_token);
    const auto contents = chain[head].contents.first(first + num_tokens);
    if (auto wrong = check_outputs(update, layer, state, convolve_last(of, kept, contents), output);
        !wrong)
      return wrong;
  }
  return {};
}

Checked StateChecker::check_recurrence(Chain chain, const ModelLayer& layer, std::size_t state,
                                       std::span<const std::vector<std::uint8_t>> pages,
                                       std::size_t output) {
  const StateNumbers& of = layer.state_numbers[state];
  const std::int64_t item = itemsize_bytes(of.dtype);
  const Update& start = chain.front();
  std::int64_t num_tokens = 0;
  for (const Update& update : chain) num_tokens += update.of->num_tokens;
  Recurrence recurrence(of, bytes_before(start.before->source, start.of->source, layer, state),
                        num_tokens > 1 && start.of->num_drafts == 0);
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Update& update = chain[i];
    for (const ContentId content : update.contents.first(update.of->num_tokens))
      recurrence.advance(content);
    recurrence.end_piece();
    const auto is = bytes_in_page(pages[i], layer, state);
    for (std::int64_t e = 0; e < layer.layout.states[state].num_elements; ++e) {
      const double found = number_at(is.data() + e * item, of.dtype);
      if (std::abs(found - recurrence.value(e)) <= recurrence.bound(e)) continue;
      return diagnosis_.state(*update.of, layer, state, e, recurrence.value(e), found,
                              recurrence.bound(e));
    }
    std::ranges::copy(is, bytes_of_state(update.words, layer, state).begin());
    counts_.state_numbers_checked += layer.layout.states[state].num_elements;
    LS_RETURN_UNLESS_FINE(check_outputs(update, layer, state, recurrence.outputs(), output));
  }
  return {};
}

Checked StateChecker::check_outputs(const Update& update, const ModelLayer& layer,
                                    std::size_t state, const Bounded& expected,
                                    std::size_t output) {
  for (std::size_t e = 0; e < expected.values.size(); ++e) {
    const double found = readback_->state_outputs[update.first_output + output + e];
    if (std::abs(found - expected.values[e]) <= expected.bounds[e]) continue;
    return diagnosis_.state_output(*update.of, layer, state, static_cast<std::int64_t>(e),
                                   expected.values[e], found, expected.bounds[e]);
  }
  counts_.state_outputs_checked += static_cast<std::int64_t>(expected.values.size());
  return {};
}

}  // namespace lockstep
