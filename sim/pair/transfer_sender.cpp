#include "sim/pair/transfer_sender.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

bool TransferSender::request_finished(RequestId request, std::string_view name) {
  const auto expected = expected_.find(name);
  if (expected == expected_.end()) return false;
  LS_CHECK(scheduler_ != nullptr, "{} finishes before the sender knows any block table", name);
  Held held{.request = request,
            .num_tokens = scheduler_->num_computed_tokens(request),
            .tables = {},
            .expires_ns = now_ns_ + link_.times.lease_ns};
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const auto table = scheduler_->block_table(request, g);
    held.tables.emplace_back(table.begin(), table.end());
  }
  const bool is_first = held_.emplace(expected->second, std::move(held)).second;
  LS_CHECK(is_first, "transfer {}.{} is held twice", expected->second.request,
           expected->second.attempt);
  expected_.erase(expected);
  ++num_frees_delayed_;
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
    ++link_.counts.stale;  // not a message to a prefill engine
}

void TransferSender::answer_read(const TransferMessage& message) {
  const Asked asked{message.transfer, message.place};
  const auto found = held_.find(message.transfer);
  if (found == held_.end()) return say_gone(asked);
  Held& held = found->second;
  held.expires_ns = now_ns_ + link_.times.lease_ns;
  const auto [group, index] = message.place;
  const std::vector<BlockId>& table = held.tables.at(static_cast<std::size_t>(group));
  LS_CHECK(index >= 0 && index < std::ssize(table), "entry {} of a table of {} is read", index,
           table.size());
  LS_CHECK(table[index] != kNullBlock, "entry {} of group {} is read, where nothing is kept", index,
           group);
  if (std::ranges::find(asked_, asked) == asked_.end()) asked_.push_back(asked);
}

void TransferSender::say_gone(const Asked& asked) {
  ++link_.counts.gone;
  link_.say(now_ns_, {.kind = TransferMessage::Kind::gone,
                      .transfer = asked.transfer,
                      .place = asked.place,
                      .bytes = {}});
}

void TransferSender::plan(const DecidedStep&, StepTransfers& transfers) {
  LS_CHECK(staged_.empty(), "{} blocks of the last step were never taken", staged_.size());
  std::size_t num_taken = 0;
  for (; num_taken < asked_.size() && std::ssize(staged_) < staging_blocks_; ++num_taken) {
    const Asked& asked = asked_[num_taken];
    const auto held = held_.find(asked.transfer);
    if (held == held_.end()) {
      say_gone(asked);
      continue;
    }
    const auto& table = held->second.tables.at(static_cast<std::size_t>(asked.place.group));
    const BlockTransfer store{.request = held->second.request,
                              .group = asked.place.group,
                              .entry = asked.place.index,
                              .block = table.at(static_cast<std::size_t>(asked.place.index)),
                              .host = HostBlockId{static_cast<std::int32_t>(staged_.size())},
                              .num_tokens = held->second.num_tokens};
    Staged& staged = staged_.emplace_back(Staged{asked, store, {}});
    if (link_.defect == TransferDefect::stage_read_early)
      staged.read_early = read_block_(asked.transfer, asked.place, store);
    transfers.stores.push_back(store);
  }
  asked_.erase(asked_.begin(), asked_.begin() + static_cast<std::ptrdiff_t>(num_taken));
  transfers.num_frees_delayed = num_frees_delayed_;
}

Result<void> TransferSender::take_staged(std::int64_t end_ns) {
  for (Staged& staged : std::exchange(staged_, {})) {
    const auto& [transfer, place] = staged.what;
    LS_ASSIGN_OR_RETURN(auto bytes, staged.read_early ? std::move(*staged.read_early)
                                                      : read_block_(transfer, place, staged.store));
    leaving_.push_back({end_ns,
                        {.kind = TransferMessage::Kind::block,
                         .transfer = transfer,
                         .place = place,
                         .bytes = std::move(bytes)}});
  }
  return {};
}

void TransferSender::say_block(const TransferMessage& message) {
  ++link_.counts.blocks_sent;
  link_.say(now_ns_, message);
  const auto found = held_.find(message.transfer);
  if (link_.defect != TransferDefect::send_freed_early || found == held_.end()) return;
  Held& held = found->second;
  const auto& table = held.tables.at(static_cast<std::size_t>(message.place.group));
  if (message.place.index + 1 != std::ssize(table) || held.is_free) return;
  held.is_free = true;
  sent_.emplace_back(message.transfer, held.request);
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
  std::erase_if(leaving_, [&](const Outgoing& leaving) {
    if (leaving.at_ns > now_ns) return false;
    say_block(leaving.message);
    return true;
  });
  std::erase_if(held_, [&](const auto& entry) {
    const auto& [transfer, held] = entry;
    if (held.expires_ns > now_ns) return false;
    ++link_.counts.leases_expired;
    if (!held.is_free) sent_.emplace_back(transfer, held.request);
    return true;
  });
}

std::optional<std::int64_t> TransferSender::next_timer_ns() const {
  std::optional<std::int64_t> next;
  const auto sooner = [&next](std::int64_t at_ns) { next = std::min(next.value_or(at_ns), at_ns); };
  for (const auto& [transfer, held] : held_) sooner(held.expires_ns);
  for (const Outgoing& leaving : leaving_) sooner(leaving.at_ns);
  return next;
}

void TransferSender::report(KVConnectorOutput& report) {
  for (const auto& [transfer, request] : sent_) {
    report.finished_sending.push_back(request);
    freed_.push_back(transfer);
  }
  sent_.clear();
}

}  // namespace lockstep
