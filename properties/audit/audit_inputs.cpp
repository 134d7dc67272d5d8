// What requests bring beside tokens: adapters, images that an encoder has to compute, a grammar
// that they wait for, and a pooled output in place of tokens.
#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "properties/audit/audit_impl.h"

namespace lockstep {
namespace {

// Whether a token of [first, last) gets a row of the item.
bool needs_rows(const PromptItem& item, std::int32_t first, std::int32_t last) {
  const auto meets = [&](std::int32_t begin, std::int32_t count) {
    return first < item.first + begin + count && item.first + begin < last;
  };
  if (item.embeds.empty()) return meets(0, item.count);
  return std::ranges::any_of(item.embeds,
                             [&](const TokenSpan& span) { return meets(span.first, span.count); });
}

}  // namespace

// Weights of so many adapters lie on the device.
void Auditor::Impl::check_adapters(const RecordedStep& step) {
  if (!inputs_.max_loras) return;
  std::set<std::int64_t> adapters;
  for (const RecordedScheduled& row : step.scheduled) {
    const auto found = requests_.find(row.id);
    if (found != requests_.end() && !found->second.keyed.keys.lora.name.empty())
      adapters.insert(found->second.keyed.keys.lora.id);
  }
  if (std::ssize(adapters) > *inputs_.max_loras)
    report(AuditRule::limits, {},
           fmt::format("{} adapters are in the step, and a worker has room for {}: max_loras",
                       adapters.size(), *inputs_.max_loras),
           "adapters");
}

// The worker's encoder: it drops rows, computes those of items, and a row of tokens takes them.
void Auditor::Impl::run_encoder(const RecordedStep& step) {
  if (!encoder_budget_) return;
  for (const std::string& item : step.inputs.free_encoder) encoded_.erase(item);
  std::int64_t num_rows = 0;
  for (const RecordedScheduled& scheduled : step.scheduled) {
    const auto found = requests_.find(scheduled.id);
    if (found == requests_.end()) continue;
    const std::vector<PromptItem>& items = found->second.keyed.keys.mm;
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
  if (num_rows > *encoder_budget_)
    report(AuditRule::limits, {},
           fmt::format("{} rows are encoded in the step, and the encoder has room for {}: "
                       "encoder_compute_budget",
                       num_rows, *encoder_budget_),
           "budget");
}

void Auditor::Impl::check_encoded(const AuditRow& row) {
  if (!encoder_budget_ || has_cross_attention_) return;
  for (const PromptItem& item : row.request->keyed.keys.mm)
    if (needs_rows(item, row.first, row.last) && !encoded_.contains(item.identifier))
      report(AuditRule::inputs, row.request->name,
             fmt::format("tokens [{}, {}) are computed, and the encoder's rows of {} {}, tokens "
                         "[{}, {}), are not there: never computed, or dropped",
                         row.first, row.last, item.kind, item.identifier, item.first,
                         item.first + item.count),
             item.identifier);
}

// Nobody is let in before what it waits for has come.
void Auditor::Impl::check_grammar(const AuditedRequest& request) {
  if (request.awaits_grammar)
    report(AuditRule::inputs, request.name, "is scheduled before its grammar is compiled");
}

void Auditor::Impl::take_input_event(const RecordedEvent& event) {
  if (event.kind == RecordedEvent::Kind::reset_encoder_cache) encoded_.clear();
  if (event.kind != RecordedEvent::Kind::grammar_ready) return;
  if (const auto found = requests_.find(event.name); found != requests_.end())
    found->second.awaits_grammar = false;
}

// A pooled output stands for a whole prompt.
void Auditor::Impl::take_pooled(const RecordedStep& step) {
  for (const std::string& name : step.inputs.pooled) {
    const auto found = requests_.find(name);
    if (found == requests_.end()) continue;
    AuditedRequest& request = found->second;
    request.is_pooled = true;
    if (request.computed < request.num_prompt)
      report(
          AuditRule::sampled, name,
          fmt::format("is pooled after {} of its {} tokens", request.computed, request.num_prompt));
  }
}

// Cross-attention: the rows of an encoder, computed with the first chunk and read by every token.
void Auditor::Impl::use_encoder_rows(const AuditRow& row, std::size_t group,
                                     const RecordedStep& step) {
  const AuditedRequest& request = *row.request;
  const std::vector<BlockId>& table = request.tables[group];
  const std::int32_t size = block_size(group);
  const auto scheduled = std::ranges::find(step.scheduled, request.name, &RecordedScheduled::id);
  const bool is_encoded = scheduled != step.scheduled.end() && !scheduled->encode.empty();
  std::int32_t position = 0;
  for (const PromptItem& item : request.keyed.keys.mm) {
    for (std::int32_t i = 0; i < item.count; ++i, ++position) {
      const auto index = static_cast<std::size_t>(position / size);
      const BlockId block = index < table.size() ? table[index] : kNullBlock;
      const bool is_own =
          block != kNullBlock && ledger_.belongs_to(block, static_cast<std::int32_t>(group));
      const std::uint64_t content = content_of_encoder_row(item, i);
      if (is_own && is_encoded)
        ledger_.write(block, position % size, {content, request.index, position}, 0);
      ++reads_;
      if (is_own && ledger_.read(block, position % size).content == content) continue;
      return report(
          AuditRule::attention_read, request, group, position, block,
          fmt::format("cross-attention of tokens [{}, {}) reads row {} of {} {} from block {}, "
                      "which does not hold it",
                      row.first, row.last, i, item.kind, item.identifier, index_of(block)));
    }
  }
}

}  // namespace lockstep
