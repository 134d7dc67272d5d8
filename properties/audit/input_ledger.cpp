#include "properties/audit/input_ledger.h"

#include <fmt/core.h>

#include <algorithm>

namespace lockstep {
namespace {

// True if a token of [first, last) has a row of the item.
bool needs_rows(const PromptItem& item, std::int32_t first, std::int32_t last) {
  const auto meets = [&](std::int32_t begin, std::int32_t count) {
    return first < item.first + begin + count && item.first + begin < last;
  };
  if (item.embeds.empty()) return meets(0, item.count);
  return std::ranges::any_of(item.embeds,
                             [&](const TokenSpan& span) { return meets(span.first, span.count); });
}

}  // namespace

InputLedger::InputLedger(AuditCore& core, OutputLedger& outputs, const RecordingHeader& header)
    : Ledger(core),
      outputs_(outputs),
      has_encoder_(header.encoder_compute_budget.has_value()),
      has_cross_attention_(std::ranges::any_of(header.groups, [](const KVCacheGroupSpec& group) {
        return is_cross_attention(group.spec);
      })) {}

void InputLedger::begin(const RecordedEvent& event) {
  if (event.kind == RecordedEvent::Kind::reset_encoder_cache) encoded_.clear();
  if (event.kind != RecordedEvent::Kind::grammar_ready) return;
  if (const AuditRequest* request = requests_.find(event.name); request != nullptr)
    awaits_grammar_[*request] = false;
}

void InputLedger::check_grammar(const AuditRequest& request) const {
  if (awaits_grammar_[request])
    report(AuditRule::inputs, request.name, "is scheduled before its grammar is compiled");
}

std::int64_t InputLedger::run_encoder(const RecordedStep& step) {
  if (!has_encoder_) return 0;
  for (const std::string& item : step.inputs.free_encoder) encoded_.erase(item);
  std::int64_t num_rows = 0;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    const AuditRequest* request = requests_.find(scheduled.id);
    if (request == nullptr) continue;
    const std::vector<PromptItem>& items = request->keyed.keys.mm;
    for (const std::int32_t number : scheduled.encode) {
      if (std::cmp_greater_equal(number, items.size())) {
        report(AuditRule::inputs, scheduled.id,
               fmt::format("item {} is encoded, and the request has {}", number, items.size()));
        continue;
      }
      const PromptItem& item = items[static_cast<std::size_t>(number)];
      num_rows += item.num_rows();
      encoded_.insert(item.identifier);
    }
  }
  return num_rows;
}

void InputLedger::step(std::span<const AuditRow> rows) const {
  if (!has_encoder_ || has_cross_attention_) return;
  for (const AuditRow& row : rows)
    for (const PromptItem& item : row.request->keyed.keys.mm)
      if (needs_rows(item, row.first, row.last) && !encoded_.contains(item.identifier))
        report(AuditRule::inputs, row.request->name,
               fmt::format("tokens [{}, {}) are computed, and the encoder's rows of {} {}, tokens "
                           "[{}, {}), are not there: never computed, or dropped",
                           row.first, row.last, item.kind, item.identifier, item.first,
                           item.first + item.count),
               item.identifier);
}

void InputLedger::end(const RecordedStep& step) {
  for (const std::string& name : step.inputs.pooled) {
    const AuditRequest* request = requests_.find(name);
    if (request == nullptr) continue;
    outputs_.ends_of(*request).is_pooled = true;
    if (request->computed < request->num_prompt)
      report(AuditRule::sampled, name,
             fmt::format("is pooled after {} of its {} tokens", request->computed,
                         request->num_prompt));
  }
}

void InputLedger::read_encoder_rows(const RecordedStep& step, std::span<const AuditRow> rows,
                                    std::size_t group) {
  for (const AuditRow& row : rows) {
    const auto scheduled =
        std::ranges::find(step.scheduled, row.request->name, &RecordedScheduled::id);
    read_encoder_rows(row, group, scheduled != step.scheduled.end() && !scheduled->encode.empty());
  }
}

// The first chunk writes the rows of the encoder, and every token reads them.
void InputLedger::read_encoder_rows(const AuditRow& row, std::size_t group, bool is_encoded) {
  const AuditRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  std::int32_t position = 0;
  for (const PromptItem& item : request.keyed.keys.mm) {
    for (std::int32_t i = 0; i < item.count; ++i, ++position) {
      const auto index = static_cast<std::size_t>(position / size);
      const BlockId block = index < table.size() ? table[index] : kNullBlock;
      const bool is_own =
          block != kNullBlock && pool_.belongs_to(block, static_cast<std::int32_t>(group));
      const std::uint64_t content = content_of_encoder_row(item, i);
      if (is_own && is_encoded)
        pool_.write(block, position % size, {content, request.index, position}, 0);
      ++core_.num_reads;
      if (is_own && pool_.read(block, position % size).content == content) continue;
      return report(
          AuditRule::attention_read, request, group, position, block,
          fmt::format("cross-attention of tokens [{}, {}) reads row {} of {} {} from block {}, "
                      "which does not hold it",
                      row.first, row.last, i, item.kind, item.identifier, index_of(block)));
    }
  }
}

}  // namespace lockstep
