#include "sim/check/diagnosis.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/check.h"
#include "base/number_text.h"
#include "reference/memory/page_image.h"
#include "reference/types/token_rows.h"
#include "sim/step/draft_planner.h"
#include "sim/step/model_step.h"

namespace lockstep {

// Describes what a step did for one request. A slice of one token counts as decode only if it is
// the last known token; a one-token chunk of a prefill is not.
static std::string what_runs(const StepProgram& program, const WorkerRequest& request,
                             const RowSlice& slice) {
  const std::int64_t last = std::int64_t{slice.first_position} + slice.num_tokens;
  const bool decode = slice.num_tokens == 1 && last == request.num_known;
  return fmt::format("{} {} tokens [{}, {}) in row {}; {} requests and {} tokens in the step",
                     decode ? "decode of" : "prefill or verification of", request.name,
                     slice.first_position, last, slice.row, program.rows.size(),
                     program.contents.size());
}

// Returns the first wrong byte of the page, -1 if all are right. Counts the wrong ones.
static std::int64_t first_wrong_byte(Divergence& found) {
  LS_CHECK(found.found_page.size() == found.expected_page.size(), "{} bytes read, {} expected",
           found.found_page.size(), found.expected_page.size());
  std::int64_t first = -1;
  for (std::size_t i = 0; i < found.found_page.size(); ++i) {
    if (found.found_page[i] == found.expected_page[i]) continue;
    if (first < 0) first = static_cast<std::int64_t>(i);
    ++found.wrong_bytes;
  }
  return first;
}

void Diagnosis::begin_step(const StepProgram& program, std::span<const RequestId> requests) {
  program_ = &program;
  requests_.assign(requests.begin(), requests.end());
}

Divergence Diagnosis::about(Phase phase) const {
  LS_CHECK(program_ != nullptr, "no step");
  Divergence found{.phase = phase, .step = program_->step};
  found.doing =
      fmt::format("{} requests, {} tokens", program_->rows.size(), program_->contents.size());
  return found;
}

void Diagnosis::set_layer(Divergence& found, std::int32_t layer) const {
  const ModelLayer& of = model_.layers()[layer];
  found.layer = layer;
  found.layer_name = of.name;
  found.group = of.group;
  found.tensor = of.memory.tensor;
}

// A divergence may concern a request that the step does not schedule; `doing` then keeps the step's
// totals.
void Diagnosis::set_doing(Divergence& found) const {
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const WorkerRequest& request = worker_.at(requests_[i]);
    if (request.name == found.request)
      found.doing = what_runs(*program_, request, program_->rows[i]);
  }
}

// Sets the expected owner of a byte: request, layer, slot and token. Bytes outside every layer are
// "free" if no group owns the block, else padding.
void Diagnosis::set_owner(Divergence& found, ModelPage page, std::int64_t byte) const {
  const ByteOwner owner = model_.owner_of(page, byte);
  found.tensor = page.tensor;
  found.block = index_of(owner.block);
  found.group = owner.group;
  found.byte = byte;
  const BlockContent& block = model_.block(owner.block);
  if (owner.layer < 0) {
    found.part = owner.group < 0 ? "free" : "padding or unused space";
    return;
  }
  const ModelLayer& layer = model_.layers()[owner.layer];
  set_layer(found, owner.layer);
  found.part = part_name(layer, owner.part);
  found.head = static_cast<std::int32_t>(owner.head);
  if (owner.what == ByteOwner::What::state) {
    if (block.state.writer == kNobody) return;
    found.request = model_.writer_name(block.state.writer);
    found.token = block.state.num_tokens;
    return;
  }
  // Tokens, also where a row covers several of them: slot_offset is that of the row's last token.
  found.slot = index_of(owner.block) * model_.block_size(owner.group) + owner.slot_offset;
  if (const SlotContent* slot =
          model_.slot_content(owner.group, owner.block, owner.slot_offset, layer.lane)) {
    found.request = model_.writer_name(slot->writer);
    found.token = slot->position;
  }
}

void Diagnosis::set_journal(Divergence& found, ModelPage page, std::int64_t byte) const {
  const ByteOwner owner = model_.owner_of(page, byte);
  const BlockContent& block = model_.block(owner.block);
  found.writer = "the model: never written";
  if (owner.what == ByteOwner::What::row) {
    if (const SlotContent* slot = model_.slot_content(owner.group, owner.block, owner.slot_offset,
                                                      model_.layers()[owner.layer].lane))
      found.writer = fmt::format("the model: {}'s token {} in step {}",
                                 model_.writer_name(slot->writer), slot->position, slot->step);
  } else if (owner.what == ByteOwner::What::state && block.state.writer != kNobody) {
    found.writer = fmt::format("the model: {}'s state after {} tokens in step {}",
                               model_.writer_name(block.state.writer), block.state.num_tokens,
                               block.state.step);
  }
  // The two writers are independent: the model's is the write that should have been last, the
  // backend's the one that was.
  const auto writer = backend_.who_wrote({page.tensor, BlockId{page.index}}, byte);
  if (writer)
    found.writer += fmt::format("; the device: kernel {}, step {}, {}", writer->kernel,
                                writer->step, writer->thread);
}

Result<Divergence> Diagnosis::page(Phase phase, ModelPage page) {
  Divergence found = about(phase);
  LS_ASSIGN_OR_RETURN(found.found_page, backend_.read_page({page.tensor, BlockId{page.index}}));
  found.expected_page = model_.page_image(page);
  found.spans = page_spans(model_, page);
  const std::int64_t first = first_wrong_byte(found);
  if (first < 0) {
    found.tensor = page.tensor;
    found.block = page.index;
    found.message = fmt::format(
        "page {} of tensor {}: its bytes read back correct, but its fingerprint is wrong: the "
        "device computed it wrong, or something changed the page in between",
        page.index, page.tensor);
    return found;
  }
  set_owner(found, page, first);
  set_journal(found, page, first);
  set_doing(found);
  const ByteOwner owner = model_.owner_of(page, first);
  // set_owner() names what belongs at the byte. The content that is there is searched below.
  const auto at = static_cast<std::size_t>(first);
  found.expected = hex_bytes(std::span(found.expected_page).subspan(at));
  found.found = hex_bytes(std::span(found.found_page).subspan(at));
  // A row is looked up whole, or its first piece if its scales are stored elsewhere. Any other byte
  // is looked up from the start of its 8-byte word, with 64 bytes of context.
  const bool row = owner.what == ByteOwner::What::row &&
                   owner.byte_in_row < rest_of_piece(model_.layers()[owner.layer], 0);
  const std::int64_t begin = row ? first - owner.byte_in_row : first / 8 * 8;
  const std::int64_t size = row ? rest_of_piece(model_.layers()[owner.layer], 0) : 64;
  const auto from_begin = [&](std::span<const std::uint8_t> page_bytes) {
    const auto tail = page_bytes.subspan(static_cast<std::size_t>(begin));
    return tail.first(std::min(tail.size(), static_cast<std::size_t>(size)));
  };
  found.owner = whose_content(model_, owner, begin, from_begin(found.found_page),
                              from_begin(found.expected_page));
  const std::string where = found.layer < 0 ? found.part
                                            : fmt::format("{} of layer {} ({})", found.part,
                                                          found.layer, found.layer_name);
  found.message = fmt::format(
      "page {} of tensor {} differs in {} of {} bytes, first at byte {}: {} of block {}{}{}: {}",
      page.index, page.tensor, found.wrong_bytes, found.found_page.size(), first, where,
      found.block, found.slot < 0 ? "" : fmt::format(", slot {}", found.slot),
      !found.request.empty() ? fmt::format(", {}'s token {}", found.request, found.token)
      : found.slot >= 0      ? ", which was never written"
                             : "",
      found.owner.empty() ? "unknown content" : "found: " + found.owner);
  return found;
}

Divergence Diagnosis::table(std::size_t row, std::int32_t group,
                            std::span<const std::int32_t> found_row) {
  Divergence found = about(Phase::block_table);
  const WorkerRequest& request = worker_.at(requests_[row]);
  const std::vector<BlockId>& expected = request.tables[group];
  // Compares up to the shorter length: the first difference may be that one table ends.
  std::size_t entry = 0;
  while (entry < expected.size() && entry < found_row.size() &&
         index_of(expected[entry]) == found_row[entry])
    ++entry;
  found.request = request.name;
  found.group = group;
  found.token = static_cast<std::int64_t>(entry) * model_.block_size(group);
  found.byte = static_cast<std::int64_t>(entry) * 4;
  found.expected =
      entry < expected.size() ? fmt::format("{}", index_of(expected[entry])) : "no entry";
  found.found = entry < found_row.size() ? fmt::format("{}", found_row[entry]) : "no entry";
  if (entry < expected.size()) found.block = index_of(expected[entry]);
  found.doing = what_runs(*program_, request, program_->rows[row]);
  found.message = fmt::format(
      "block table of {} in group {}: entry {} should be {} but is {} ({} entries expected, {} "
      "found)",
      request.name, group, entry, found.expected, found.found, expected.size(), found_row.size());
  return found;
}

Divergence Diagnosis::slot(std::int32_t group, std::size_t token, Slot expected, Slot found_slot) {
  Divergence found = about(Phase::slot_mapping);
  found.group = group;
  found.slot = expected;
  found.expected = fmt::format("{}", expected);
  found.found = fmt::format("{}", found_slot);
  const bool is_encoder = model_.is_encoder_group(group);
  // Entries of encoder groups are rows in the order of encoder_slices, not tokens of the batch.
  std::string whose = is_encoder ? "a row of an encoder" : "a padded token, which writes nothing";
  for (std::size_t i = 0; i < program_->rows.size() && !is_encoder; ++i) {
    const RowSlice& slice = program_->rows[i];
    // Tokens of a step are concatenated row after row, as in slot_mapping of an engine.
    const auto offset = static_cast<std::int64_t>(token) - slice.first_token;
    if (offset < 0 || offset >= slice.num_tokens) continue;
    const WorkerRequest& request = worker_.at(requests_[i]);
    found.request = request.name;
    found.token = slice.first_position + offset;
    found.doing = what_runs(*program_, request, slice);
    whose = fmt::format("{}'s token {}", request.name, found.token);
  }
  if (expected >= 0) found.block = static_cast<std::int32_t>(expected / model_.block_size(group));
  found.byte = static_cast<std::int64_t>(token) * 8;
  found.message = fmt::format("slot mapping of group {}, entry {} ({}): should be {} but is {}",
                              group, token, whose, expected, found_slot);
  return found;
}

void Diagnosis::set_slot(Divergence& found, const WorkerRequest& request,
                         std::int64_t position) const {
  const std::int64_t num_sinks = model_.layers_of(found.group).front().num_sinks;
  // Sinks are in no table: sink row i is in block 1 + i / block_size (rule (22)).
  const auto [entry, offset] =
      place_of_token(model_, worker_, found.group, std::max<std::int64_t>(position - num_sinks, 0));
  const bool is_sink = position < num_sinks;
  const std::int64_t size = model_.block_size(found.group);
  std::int64_t block = 1 + position / size;
  found.token = position;
  if (!is_sink) {
    const std::vector<BlockId>& table = request.tables[found.group];
    // Another context parallel rank keeps the token: it has no slot on this one.
    if (std::cmp_greater_equal(entry, table.size())) return;
    block = index_of(table[entry]);
  }
  found.block = static_cast<std::int32_t>(block);
  found.slot = block * size + (is_sink ? position % size : offset);
}

Result<bool> Diagnosis::reads_wrong(const AttentionProbe& probe, WorkerRequest& request) {
  // A program with one probe and no write: executing it changes no memory.
  StepProgram program;
  program.step = program_->step;
  program.probes.push_back(probe);
  StepReadback readback;
  LS_RETURN_IF_ERROR(backend_.execute(program, readback));
  const ModelLayer& layer = model_.layers()[probe.layer];
  // Rows of a draft model have contents of their own, which depend on the accepted tokens.
  if (layer.lane > 0)
    return readback.digests.at(0) !=
           draft_probe(model_, request, layer, probe.first, probe.last).digest;
  return readback.digests.at(0) !=
         contents_of(layer, request).attention_digest(layer, probe.first, probe.last);
}

Result<Divergence> Diagnosis::digest(const AttentionProbe& probe, RequestId id,
                                     std::uint64_t expected, std::uint64_t found_digest) {
  // A digest is a sum over positions. If a range reads wrong and its first half does not, its
  // second half does.
  Divergence found = about(Phase::attention_digest);
  WorkerRequest& request = worker_.at(id);
  found.request = request.name;
  set_layer(found, probe.layer);
  found.expected = fmt::format("{:016x}", expected);
  found.found = fmt::format("{:016x}", found_digest);
  set_doing(found);
  const std::string range = fmt::format("layer {} ({}) over {}'s tokens [{}, {})", found.layer,
                                        found.layer_name, request.name, probe.first, probe.last);
  AttentionProbe part = probe;
  LS_ASSIGN_OR_RETURN(const bool still_wrong, reads_wrong(part, request));
  // No position can be named, so the divergence points at the first of the range.
  if (!still_wrong) {
    set_slot(found, request, probe.first);
    found.message =
        fmt::format("attention digest of {} is wrong, but right on a second read", range);
    return found;
  }
  while (part.last - part.first > 1) {  // the first half that reads wrong
    AttentionProbe half = part;
    half.last = part.first + (part.last - part.first) / 2;
    LS_ASSIGN_OR_RETURN(const bool half_is_wrong, reads_wrong(half, request));
    if (half_is_wrong)
      part.last = half.last;
    else
      part.first = half.last;
  }
  set_slot(found, request, part.first);
  const ModelLayer& layer = model_.layers()[probe.layer];
  // From the position to the byte of its first row, head 0: enough to find the writer.
  const std::int64_t offset = found.slot % model_.block_size(found.group);
  const auto at =
      model_.place_of(layer, layer.memory.row_begin(static_cast<BlockId>(found.block), 0,
                                                    rows_in(layer.tokens_per_state, offset), 0));
  found.byte = at.byte;
  set_journal(found, at.page, at.byte);
  if (const SlotContent* slot =
          model_.slot_content(found.group, static_cast<BlockId>(found.block), offset, layer.lane))
    found.owner = fmt::format("{}'s token {} of step {}, by the model",
                              model_.writer_name(slot->writer), slot->position, slot->step);
  found.message = fmt::format(
      "attention digest of {} is wrong; the first token that reads wrong is {}, in slot {} of "
      "block {}",
      range, part.first, offset, found.block);
  return found;
}

Divergence Diagnosis::output(const AttentionQuery& query, RequestId id, std::size_t element,
                             double expected, double found_value, double tolerance) {
  Divergence found = about(Phase::attention_output);
  const WorkerRequest& request = worker_.at(id);
  found.request = request.name;
  set_layer(found, query.layer);
  set_slot(found, request, query.last - 1);
  const ModelLayer& layer = model_.layers()[query.layer];
  found.head = static_cast<std::int32_t>(static_cast<std::int64_t>(element) / layer.head_size);
  // Outputs are fp32, [num_query_heads, head_size].
  found.byte = static_cast<std::int64_t>(element) * 4;
  found.expected = fmt::format("{:.9g}", expected);
  found.found = fmt::format("{:.9g}", found_value);
  set_doing(found);
  found.message = fmt::format(
      "attention of {}'s token {} over tokens [{}, {}) in layer {} ({}), query head {}, element "
      "{}: should be {} but is {} (tolerance {:.3g})",
      request.name, query.last - 1, query.first, query.last, query.layer, found.layer_name,
      found.head, static_cast<std::int64_t>(element) % layer.head_size, found.expected, found.found,
      tolerance);
  return found;
}

Divergence Diagnosis::report(const MemoryReport& report) {
  Divergence found = about(Phase::memory_check);
  // Some checkers already start their message with the kind.
  found.message =
      report.message.starts_with(report.kind)
          ? report.message
          : fmt::format("{} in kernel {}: {}", report.kind, report.kernel, report.message);
  found.doing = fmt::format("kernel {}; {}", report.kernel, found.doing);
  found.sanitizer_words = report.sanitizer_words;
  if (!report.page) return found;
  const ModelPage page{report.page->tensor, index_of(report.page->block)};
  // The page comes from the backend, so it may be any number. Owner and journal require a valid
  // one.
  const bool inside = page.tensor >= 0 && page.tensor < model_.num_tensors() && page.index >= 0 &&
                      page.index < model_.num_blocks() && report.byte_in_page >= 0 &&
                      report.byte_in_page < model_.page_size_bytes(page.tensor);
  if (!inside) return found;
  set_owner(found, page, report.byte_in_page);
  set_journal(found, page, report.byte_in_page);
  return found;
}

std::vector<PageSpan> page_spans(const MemoryModel& model, ModelPage page) {
  std::vector<PageSpan> spans;
  const std::int64_t size = model.page_size_bytes(page.tensor);
  for (std::int64_t byte = 0; byte < size;) {
    const ByteOwner owner = model.owner_of(page, byte);
    // One owner_of() call per run, not per byte: a row's piece or a state ends where its layer
    // says.
    PageSpan span{.first_byte = byte, .size_bytes = 1, .what = "unused"};
    if (owner.layer >= 0) {
      const ModelLayer& layer = model.layers()[owner.layer];
      const BlockContent& block = model.block(owner.block);
      std::string whose = block.zeroed ? "zeroed" : "not written";
      if (owner.what == ByteOwner::What::row) {
        span.size_bytes = rest_of_piece(layer, owner.byte_in_row);
        if (const SlotContent* slot =
                model.slot_content(owner.group, owner.block, owner.slot_offset, layer.lane))
          whose = fmt::format("{} token {}", model.writer_name(slot->writer), slot->position);
        span.what = fmt::format("slot {}: {} of head {}, layer {} ({})", owner.slot_offset,
                                part_name(layer, owner.part), owner.head, owner.layer, whose);
      } else {
        const auto state = static_cast<std::size_t>(owner.part - kPartState);
        span.size_bytes = layer.state_bytes(state) - owner.byte_in_row;
        if (block.state.writer != kNobody)
          whose = fmt::format("{} after {} tokens", model.writer_name(block.state.writer),
                              block.state.num_tokens);
        span.what =
            fmt::format("{}, layer {} ({})", part_name(layer, owner.part), owner.layer, whose);
      }
    } else {
      // Unused bytes have no natural end: extend the run byte by byte to the next layer's first
      // byte.
      while (byte + span.size_bytes < size &&
             model.owner_of(page, byte + span.size_bytes).layer < 0)
        ++span.size_bytes;
      span.what = owner.group < 0 ? "free" : "padding or unused space";
    }
    byte += span.size_bytes;
    spans.push_back(std::move(span));
  }
  return spans;
}

// Divergences of the host tier.

// Returns the group whose blocks fill a host block to its end. Reading by this group returns all
// bytes of a host block, whatever group stored to it.
static std::int32_t largest_group(const MemoryModel& model) {
  std::int32_t largest = 0;
  for (std::int32_t g = 0; g < model.num_groups(); ++g)
    if (model.host_bytes_of(g) > model.host_bytes_of(largest)) largest = g;
  return largest;
}

// Describes a host block's content: "group 0's block, r3's tokens from 16 on".
static std::string stored_there(const MemoryModel& model, const HostContent& host) {
  if (host.group < 0) return "nothing was stored there";
  std::string what = fmt::format("group {}'s block", host.group);
  if (host.state.writer != kNobody)
    return fmt::format("{}, {}'s state after {} tokens", what, model.writer_name(host.state.writer),
                       host.state.num_tokens);
  const auto first = std::ranges::find_if(
      host.slots, [](const SlotContent& slot) { return slot.writer != kNobody; });
  if (first == host.slots.end()) return what + ", without a KV entry";
  return fmt::format("{}, {}'s tokens from {}", what, model.writer_name(first->writer),
                     first->position);
}

Result<Divergence> Diagnosis::host_block(HostBlockId host) {
  Divergence found = about(Phase::host_block);
  const HostContent& content = model_.host_block(host);
  LS_ASSIGN_OR_RETURN(found.found_page, backend_.read_host_block(largest_group(model_), host));
  found.host_block = index_of(host);
  found.group = content.group;
  found.owner = stored_there(model_, content);
  found.expected_page = *content.bytes;
  found.spans.push_back(
      {.first_byte = 0, .size_bytes = std::ssize(found.expected_page), .what = found.owner});
  found.byte = first_wrong_byte(found);
  if (found.byte < 0) {
    found.message = fmt::format(
        "host block {}: its bytes read back correct, but its fingerprint is wrong: the device "
        "computed it wrong, or something changed the block in between",
        index_of(host));
    return found;
  }
  const auto at = static_cast<std::size_t>(found.byte);
  found.expected = hex_bytes(std::span(found.expected_page).subspan(at));
  found.found = hex_bytes(std::span(found.found_page).subspan(at));
  // The bytes of a host block past its group's size are those of an earlier, larger block.
  const bool behind = content.group < 0 || found.byte >= model_.host_bytes_of(content.group);
  if (!behind) set_layer(found, model_.host_layer_at(content.group, found.byte));
  found.message = fmt::format(
      "host block {} ({}) differs in {} of {} bytes, first at byte {}, {}", index_of(host),
      found.owner, found.wrong_bytes, found.found_page.size(), found.byte,
      behind ? "after the stored bytes"
             : fmt::format("of layer {} ({})", found.layer, found.layer_name));
  return found;
}

// Starts a divergence about a state. Its token is the number of tokens that the state covers after
// the update.

Divergence Diagnosis::about_state(Phase phase, const StateUpdate& update, const ModelLayer& layer,
                                  std::size_t state) const {
  Divergence found = about(phase);
  set_layer(found, layer.index);
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (program_->rows[i].row == update.row) found.request = worker_.at(requests_[i]).name;
  set_doing(found);
  found.block = index_of(update.target);
  found.part = fmt::format("state {}", state);
  found.token = std::int64_t{update.first_position} + update.num_tokens;
  return found;
}

Divergence Diagnosis::state(const StateUpdate& update, const ModelLayer& layer, std::size_t state,
                            std::int64_t element, double expected, double found_value,
                            double tolerance) const {
  Divergence found = about_state(Phase::page_written, update, layer, state);
  found.byte =
      layer.state_offset(state) + element * itemsize_bytes(layer.state_numbers[state].dtype);
  set_journal(found, {layer.memory.tensor, found.block}, found.byte);
  found.expected = fmt::format("{:.9g}", expected);
  found.found = fmt::format("{:.9g}", found_value);
  found.message = fmt::format(
      "state {} of layer {} ({}) in block {}, {}'s after {} tokens: element {} should be {} but is "
      "{} (tolerance {:.3g})",
      state, layer.index, layer.name, found.block, found.request, found.token, element,
      found.expected, found.found, tolerance);
  return found;
}

Divergence Diagnosis::state_output(const StateUpdate& update, const ModelLayer& layer,
                                   std::size_t state, std::int32_t token, std::int64_t element,
                                   double expected, double found_value, double tolerance) const {
  Divergence found = about_state(Phase::state_output, update, layer, state);
  found.token = update.first_position + token;
  found.byte = element * 4;
  found.expected = fmt::format("{:.9g}", expected);
  found.found = fmt::format("{:.9g}", found_value);
  found.message = fmt::format(
      "output of state {} of layer {} ({}) for {}'s token {}: element {} should be {} but is {} "
      "(tolerance {:.3g})",
      state, layer.index, layer.name, found.request, found.token, element, found.expected,
      found.found, tolerance);
  return found;
}

}  // namespace lockstep
