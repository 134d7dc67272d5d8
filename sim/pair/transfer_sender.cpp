#include "sim/pair/transfer_sender.h"

#include <algorithm>

#include "reference/check.h"

namespace lockstep {

bool TransferSender::request_finished(RequestId request, std::string_view name) {
  const auto expected = expected_.find(name);
  if (expected == expected_.end()) return false;
  LS_CHECK(decisions_ != nullptr, "{} finishes before the sender knows any block table", name);
  Held held{.request = request, .tables = {}, .expires_ns = now_ns_ + link_.times.lease_ns};
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const auto table = decisions_->block_table(request, g);
    held.tables.emplace_back(table.begin(), table.end());
  }
  const bool is_first = held_.emplace(expected->second, std::move(held)).second;
  LS_CHECK(is_first, "transfer {}.{} is held twice", expected->second.request,
           expected->second.attempt);
  expected_.erase(expected);
  return true;
}

// A planted defect takes any attempt of the request for this one.
std::map<TransferId, TransferSender::Held>::iterator TransferSender::find(TransferId transfer) {
  const auto exact = held_.find(transfer);
  if (exact != held_.end() || link_.defect != TransferDefect::completion_stale) return exact;
  const auto later = held_.lower_bound({transfer.request, 0});
  return later != held_.end() && later->first.request == transfer.request ? later : held_.end();
}

void TransferSender::take(const TransferMessage& message) {
  if (message.kind == TransferMessage::Kind::read)
    answer_read(message);
  else if (message.kind == TransferMessage::Kind::release)
    release(message);
  else
    ++link_.counts.stale;  // nobody says that to a prefill engine
}

void TransferSender::answer_read(const TransferMessage& message) {
  const auto found = held_.find(message.transfer);
  const auto [group, index] = message.place;
  TransferMessage answer{.kind = TransferMessage::Kind::gone,
                         .transfer = message.transfer,
                         .place = message.place,
                         .bytes = {}};
  if (found == held_.end()) {
    ++link_.counts.gone;
    link_.say(now_ns_, answer);
    return;
  }
  Held& held = found->second;
  held.expires_ns = now_ns_ + link_.times.lease_ns;
  const std::vector<BlockId>& table = held.tables.at(static_cast<std::size_t>(group));
  LS_CHECK(index >= 0 && index < std::ssize(table), "entry {} of a table of {} is read", index,
           table.size());
  const BlockId block = table[static_cast<std::size_t>(index)];
  LS_CHECK(block != kNullBlock, "entry {} of group {} is read, where nothing is kept", index,
           group);
  answer.kind = TransferMessage::Kind::block;
  answer.bytes = read_block_(message.transfer, message.place, block);
  ++link_.counts.blocks_sent;
  link_.say(now_ns_, answer);
  const bool was_last = index + 1 == std::ssize(table);
  if (link_.defect == TransferDefect::send_freed_early && was_last && !held.is_free) {
    held.is_free = true;
    sent_.emplace_back(message.transfer, held.request);
  }
}

void TransferSender::release(const TransferMessage& message) {
  const auto found = find(message.transfer);
  if (found != held_.end()) {
    if (!found->second.is_free) sent_.emplace_back(found->first, found->second.request);
    held_.erase(found);
  } else {
    ++link_.counts.stale;
  }
  link_.say(now_ns_, {.kind = TransferMessage::Kind::released,
                      .transfer = message.transfer,
                      .place = {},
                      .bytes = {}});
}

void TransferSender::at(std::int64_t now_ns) {
  now_ns_ = now_ns;
  std::erase_if(held_, [&](const auto& entry) {
    const auto& [transfer, held] = entry;
    if (held.expires_ns > now_ns) return false;
    ++link_.counts.leases_expired;
    if (!held.is_free) sent_.emplace_back(transfer, held.request);
    return true;
  });
}

std::optional<std::int64_t> TransferSender::next_timer_ns() const {
  if (held_.empty()) return std::nullopt;
  return std::ranges::min_element(held_, {},
                                  [](const auto& entry) { return entry.second.expires_ns; })
      ->second.expires_ns;
}

void TransferSender::report(KVConnectorOutput& report) {
  for (const auto& [transfer, request] : sent_) {
    report.finished_sending.push_back(request);
    freed_.push_back(transfer);
  }
  sent_.clear();
}

}  // namespace lockstep
