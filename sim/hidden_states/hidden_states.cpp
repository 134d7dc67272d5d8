#include "sim/hidden_states/hidden_states.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>

#include "base/check.h"
#include "base/number_text.h"
#include "base/stopwatch.h"
#include "reference/memory/page_image.h"
#include "traces/formats/safetensors.h"

namespace lockstep {

std::vector<std::uint8_t> hidden_state_file(const HiddenStates& states) {
  const std::int64_t num_tokens = std::ssize(states.contents);
  std::vector<SafeTensor> tensors;
  for (const HiddenStateRows& rows : states.layers) {
    LS_CHECK(std::ssize(rows.bytes) == num_tokens * rows.num_heads * rows.row_size_bytes,
             "{} bytes of hidden states for {} tokens", rows.bytes.size(), num_tokens);
    tensors.push_back(
        {.name = rows.layer,
         .dtype = std::string(safetensors_dtype(rows.dtype)),
         .shape = {num_tokens, rows.num_heads, rows.row_size_bytes / itemsize_bytes(rows.dtype)},
         .bytes = rows.bytes});
  }
  std::vector<std::uint8_t> ids;
  // Little-endian, as safetensors requires.
  for (const ContentId content : states.contents)
    for (int shift = 0; shift < 64; shift += 8)
      ids.push_back(static_cast<std::uint8_t>(content >> shift));
  tensors.push_back({.name = "content_ids", .dtype = "U64", .shape = {num_tokens}, .bytes = ids});
  return safetensors_file(tensors);
}

std::string HiddenStateFileNames::next(std::string_view request) {
  std::string plain;
  for (const char c : request) {
    const bool is_plain =
        std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-';
    plain += is_plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  std::string name = plain + ".safetensors";
  // A numbered name may itself be taken: a request may be called "r1-2".
  for (int number = 2; !used_.insert(name).second; ++number)
    name = fmt::format("{}-{}.safetensors", plain, number);
  return name;
}

// Bytes of a row in a message, from the first wrong one.
constexpr std::size_t kBytesShown = 16;

HiddenStateExtraction::HiddenStateExtraction(const MemoryModel& model, Worker& worker)
    : model_(model), worker_(worker) {
  for (const ModelLayer& layer : model.layers())
    if (is_hidden_state(layer.kind)) layers_.push_back(layer.index);
}

void HiddenStateExtraction::begin(std::int64_t step) {
  program_.step = step;
  program_.extractions.clear();
  requests_.clear();
}

void HiddenStateExtraction::add(RequestId id) {
  if (layers_.empty()) return;
  const WorkerRequest& request = worker_.at(id);
  // The request was preempted before its output arrived: its blocks are already free.
  if (request.row < 0) {
    ++requests_without_a_row_;
    return;
  }
  // The last token was sampled and never ran: it has no hidden state.
  const auto num_tokens = static_cast<std::int32_t>(request.num_known) - 1;
  for (const std::int32_t layer : layers_) {
    program_.extractions.push_back({.row = request.row, .layer = layer, .num_tokens = num_tokens});
    requests_.push_back(id);
  }
}

// The backend returns the rows of all extractions back to back, in their order: `at` walks them.
Checked HiddenStateExtraction::compare(const StepReadback& readback) {
  // The extraction ran a kernel of its own, so its memory reports belong to this phase.
  if (!readback.reports.empty())
    return Divergence{.phase = Phase::extraction,
                      .step = program_.step,
                      .message = readback.reports.front().message};
  std::size_t at = 0;
  std::vector<std::uint8_t> expected;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[extraction.layer];
    const PrefixContent& prefix = worker_.at(requests_[i]).prefix;
    const auto row_bytes = static_cast<std::size_t>(layer.row_size_bytes);
    expected.resize(row_bytes * static_cast<std::size_t>(layer.num_kv_heads));
    for (std::int64_t token = 0; token < extraction.num_tokens; ++token, ++rows_compared_) {
      for (std::size_t head = 0; head < expected.size() / row_bytes; ++head)
        draw_row(prefix.content(token), layer.coords[head], layer.words,
                 std::span(expected).subspan(head * row_bytes, row_bytes));
      // A wrong size is a programming error of the backend, not a divergence.
      if (at + expected.size() > readback.extracted.size())
        return fail("the backend extracted {} bytes of hidden states, too few",
                    readback.extracted.size());
      const auto found = std::span(readback.extracted).subspan(at, expected.size());
      at += expected.size();
      if (!std::ranges::equal(expected, found))
        return difference(extraction, requests_[i], token, expected, found);
    }
  }
  if (at != readback.extracted.size())
    return fail("the backend extracted {} bytes of hidden states, {} were asked for",
                readback.extracted.size(), at);
  return {};
}

std::vector<HiddenStates> HiddenStateExtraction::states(const StepReadback& readback) {
  std::vector<HiddenStates> all;
  auto at = readback.extracted.begin();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const RowExtraction& extraction = program_.extractions[i];
    const ModelLayer& layer = model_.layers()[extraction.layer];
    // Extractions of one request are adjacent, in the order of layers_: the first starts a new one.
    if (extraction.layer == layers_.front()) {
      const WorkerRequest& request = worker_.at(requests_[i]);
      HiddenStates& states = all.emplace_back();
      states.request = request.name;
      for (std::int64_t token = 0; token < extraction.num_tokens; ++token)
        states.contents.push_back(request.prefix.content(token));
    }
    const std::int64_t num_heads = layer.num_kv_heads;
    const auto end = at + extraction.num_tokens * num_heads * layer.row_size_bytes;
    all.back().layers.push_back({.layer = layer.name,
                                 .dtype = layer.dtype,
                                 .num_heads = num_heads,
                                 .row_size_bytes = layer.row_size_bytes,
                                 .bytes = {at, end}});
    at = end;
  }
  return all;
}

Divergence HiddenStateExtraction::difference(const RowExtraction& extraction, RequestId id,
                                             std::int64_t token,
                                             std::span<const std::uint8_t> expected,
                                             std::span<const std::uint8_t> found_row) const {
  const WorkerRequest& request = worker_.at(id);
  const ModelLayer& layer = model_.layers()[extraction.layer];
  // The tables still hold the freed blocks until the next decision.
  const std::int64_t size = model_.block_size(layer.group);
  const auto& table = request.tables[layer.group];
  const auto wrong = std::ranges::mismatch(expected, found_row).in1 - expected.begin();
  Divergence found;
  found.phase = Phase::extraction;
  found.step = program_.step;
  found.request = request.name;
  found.layer = layer.index;
  found.layer_name = layer.name;
  found.group = layer.group;
  found.block = index_of(table[token / size]);
  found.slot = found.block * size + token % size;
  found.part = "hidden";
  found.token = token;
  found.byte = wrong;
  found.expected = hex_bytes(expected.subspan(wrong), kBytesShown);
  found.found = hex_bytes(found_row.subspan(wrong), kBytesShown);
  found.doing = fmt::format("extraction of the hidden states of {}, which has ended with {} tokens",
                            request.name, request.num_known);
  found.message = fmt::format(
      "hidden state of {}'s token {} in layer {} ({}), slot {} of block {}: the extracted row "
      "differs from byte {}",
      request.name, token, layer.index, layer.name, found.slot, found.block, wrong);
  return found;
}

std::int64_t Disk::end_ns(std::int64_t now_ns) {
  LS_CHECK(now_ns >= now_ns_, "asked at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  return now_ns + random_.between(options_.delay_ns_min, options_.delay_ns_max);
}

DiskTicket Disk::write(std::int64_t now_ns, const std::string& path,
                       std::vector<std::uint8_t> bytes) {
  File& file = files_[path];
  LS_CHECK(file.end_ns <= now_ns, "{} is still being written", path);
  ++counts_.writes;
  // A failed write may leave a part of the file, as a full disk or a crash does. A torn file has at
  // least one byte and lacks at least one.
  const bool is_done = !random_.chance(options_.fail_percent);
  std::size_t num_bytes = bytes.size();
  if (!is_done) {
    ++counts_.writes_failed;
    const bool is_torn = num_bytes > 1 && random_.chance(options_.torn_percent);
    counts_.writes_torn += is_torn ? 1 : 0;
    num_bytes = is_torn ? static_cast<std::size_t>(random_.between(1, std::ssize(bytes) - 1)) : 0;
  }
  file = {.bytes = std::move(bytes), .begin_ns = now_ns, .end_ns = end_ns(now_ns)};
  const DiskTicket ticket{num_tickets_++};
  under_way_.emplace(file.end_ns, UnderWay{ticket, is_done, path, {}, num_bytes});
  return ticket;
}

DiskTicket Disk::rename(std::int64_t now_ns, const std::string& from, const std::string& to) {
  ++counts_.renames;
  const bool is_done = !random_.chance(options_.fail_percent);
  counts_.renames_failed += is_done ? 0 : 1;
  const DiskTicket ticket{num_tickets_++};
  // A failed rename also takes its time.
  under_way_.emplace(end_ns(now_ns), UnderWay{ticket, is_done, from, to, 0});
  return ticket;
}

void Disk::remove(const std::string& path) {
  LS_CHECK(std::ranges::none_of(under_way_,
                                [&](const auto& entry) { return entry.second.path == path; }),
           "{} is removed while something is done with it", path);
  LS_CHECK(files_.erase(path) == 1, "{} is removed and is not there", path);
}

std::optional<DiskCompletion> Disk::complete(std::int64_t now_ns) {
  LS_CHECK(now_ns >= now_ns_, "asked at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  if (under_way_.empty() || under_way_.begin()->first > now_ns) return std::nullopt;
  const UnderWay over = std::move(under_way_.begin()->second);
  under_way_.erase(under_way_.begin());
  if (over.renamed_to.empty()) {
    // Until now a reader saw the part that time had reached; from here on the part that remains.
    files_.at(over.path).bytes.resize(over.num_bytes);
  } else if (over.is_done) {
    auto file = files_.extract(over.path);
    LS_CHECK(!file.empty(), "{} is renamed and is not there", over.path);
    files_[over.renamed_to] = std::move(file.mapped());
  }
  return DiskCompletion{over.ticket, over.is_done};
}

std::optional<std::int64_t> Disk::next_due_ns() const {
  if (under_way_.empty()) return std::nullopt;
  return under_way_.begin()->first;
}

std::optional<std::vector<std::uint8_t>> Disk::read(std::int64_t now_ns,
                                                    const std::string& path) const {
  const auto found = files_.find(path);
  if (found == files_.end()) return std::nullopt;
  const File& file = found->second;
  // While the write is in progress, a reader sees a prefix that grows evenly: 10,000 bytes over 2
  // ms show 5,000 after 1 ms.
  if (now_ns >= file.end_ns) return file.bytes;
  const std::int64_t there =
      std::ssize(file.bytes) * (now_ns - file.begin_ns) / (file.end_ns - file.begin_ns);
  return std::vector<std::uint8_t>(file.bytes.begin(), file.bytes.begin() + there);
}

std::vector<std::string> Disk::paths() const {
  std::vector<std::string> paths;
  for (const auto& [path, file] : files_) paths.push_back(path);
  return paths;
}

void WholeFiles::put(std::int64_t now_ns, const std::string& name,
                     std::vector<std::uint8_t> bytes) {
  LS_CHECK(std::ranges::none_of(under_way_,
                                [&](const auto& entry) { return entry.second.name == name; }),
           "{} is put while it is being put", name);
  write(now_ns, {.name = name, .aside = {}, .bytes = std::move(bytes)});
}

// Starts a try under a temporary name that no other try has used.
void WholeFiles::write(std::int64_t now_ns, Put put) {
  put.aside = writes_in_place_ ? put.name : fmt::format("{}{}{}", put.name, kAside, num_asides_++);
  put.is_written = false;
  ++put.tries;
  const DiskTicket ticket = disk_.write(now_ns, put.aside, put.bytes);
  under_way_.emplace(ticket, std::move(put));
}

std::vector<WholeFiles::Outcome> WholeFiles::take_outcomes(std::int64_t now_ns) {
  std::vector<Outcome> outcomes;
  while (const auto completion = disk_.complete(now_ns)) {
    auto node = under_way_.extract(completion->ticket);
    LS_CHECK(!node.empty(), "ticket {} is another's",
             static_cast<std::uint64_t>(completion->ticket));
    Put put = std::move(node.mapped());
    // Either the rename has completed, or the defect needs none.
    if (completion->is_done && (put.is_written || writes_in_place_)) {
      outcomes.push_back({put.name, true});
      continue;
    }
    if (completion->is_done) {
      put.is_written = true;
      const DiskTicket ticket = disk_.rename(now_ns, put.aside, put.name);
      under_way_.emplace(ticket, std::move(put));
      continue;
    }
    // A torn file is never renamed: the name shows a complete file or nothing. After a failed
    // rename the whole file is written again.
    disk_.remove(put.aside);
    if (put.tries >= tries_max_) {
      outcomes.push_back({put.name, false});
      continue;
    }
    ++num_retries_;
    write(now_ns, std::move(put));
  }
  return outcomes;
}

// A trainer polls more often than a write lasts (100 us or more), so it sees every write in
// progress.
constexpr std::int64_t kLookEveryNs = 50'000;
// Frequent enough for retries in short runs.
constexpr std::int32_t kDiskFailsPercent = 10;
constexpr std::size_t kFileBytesShown = 16;

// A failed operation is repeated without limit, so every file appears in the end.
WatchedFiles::WatchedFiles(std::uint64_t seed, HiddenStateDefect defect)
    : disk_({.seed = seed, .fail_percent = kDiskFailsPercent}),
      files_(disk_, std::numeric_limits<std::int32_t>::max(),
             defect == HiddenStateDefect::hidden_save_race) {}

void WatchedFiles::save(std::int64_t now_ns, std::int64_t step, const HiddenStates& states) {
  LS_CHECK(now_ns >= now_ns_, "saved at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  const std::string name = names_.next(states.request);
  const auto [expected, is_first] =
      expected_.emplace(name, Expected{states.request, step, hidden_state_file(states)});
  LS_CHECK(is_first, "{} is saved twice", name);
  files_.put(now_ns, name, expected->second.bytes);
}

Checked WatchedFiles::look(std::int64_t now_ns) {
  while (!expected_.empty() && now_ns_ < now_ns) {
    now_ns_ = std::min(now_ns, now_ns_ + kLookEveryNs);
    LS_RETURN_UNLESS_FINE(look_for_all());
  }
  now_ns_ = std::max(now_ns_, now_ns);
  return {};
}

Checked WatchedFiles::finish() {
  while (!expected_.empty()) {
    // Otherwise the loop would never end: no operation is in progress that could complete a file.
    LS_CHECK(disk_.next_due_ns().has_value(), "{} is neither written nor seen",
             expected_.begin()->first);
    now_ns_ += kLookEveryNs;
    LS_RETURN_UNLESS_FINE(look_for_all());
  }
  return {};
}

Checked WatchedFiles::look_for_all() {
  // The disk first: a file whose rename completes now is visible now.
  for (const WholeFiles::Outcome& outcome : files_.take_outcomes(now_ns_))
    LS_CHECK(outcome.is_done, "{} was given up", outcome.name);
  for (auto file = expected_.begin(); file != expected_.end();) {
    const auto seen = disk_.read(now_ns_, file->first);
    if (!seen) {
      ++file;
      continue;
    }
    if (*seen != file->second.bytes) return difference(file->first, file->second, *seen);
    ++num_seen_;
    disk_.remove(file->first);
    file = expected_.erase(file);
  }
  return {};
}

Divergence WatchedFiles::difference(const std::string& name, const Expected& expected,
                                    std::span<const std::uint8_t> seen) {
  // An incomplete file usually fails to parse, which the message then states. A file that parses
  // has wrong rows.
  const auto tensors = read_safetensors(seen);
  const auto wrong =
      std::ranges::mismatch(std::span<const std::uint8_t>(expected.bytes), seen).in1 -
      std::span<const std::uint8_t>(expected.bytes).begin();
  Divergence found{.phase = Phase::hidden_file,
                   .step = expected.step,
                   .request = expected.request,
                   .part = "hidden",
                   .byte = wrong};
  found.expected =
      hex_bytes(std::span<const std::uint8_t>(expected.bytes).subspan(wrong), kFileBytesShown);
  found.found = hex_bytes(seen.subspan(wrong), kFileBytesShown);
  found.doing = fmt::format("a trainer looks for {}", name);
  found.message = fmt::format("{} with the hidden states of {} is visible with {} of {} bytes: {}",
                              name, expected.request, seen.size(), expected.bytes.size(),
                              tensors ? "a file of other rows" : tensors.error().message);
  return found;
}

void HiddenStateCheck::begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                             RunSummary& summary) {
  config_ = config;
  summary_ = &summary;
  for (const RankMemory& rank : ranks)
    ranks_.push_back({rank, HiddenStateExtraction(rank.model, rank.worker), {}});
}

Checked HiddenStateCheck::output_taken(std::span<const StoppedRequest> stopped,
                                       std::int64_t now_ns) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Checked compared = extract(ranks_[rank], stopped);
    if (compared) continue;
    if (compared.has_diverged() && ranks_.size() > 1)
      set_rank(config_, static_cast<std::int32_t>(rank), compared.divergence());
    return compared;
  }
  // Polls up to now before this step's files are saved: they start at now.
  LS_RETURN_UNLESS_FINE(files_.look(now_ns));
  return ranks_.size() == 1 ? keep(ranks_.front(), now_ns) : Checked();
}

Checked HiddenStateCheck::extract(Rank& rank, std::span<const StoppedRequest> stopped) {
  rank.extraction.begin(rank.memory.program.step);
  for (const StoppedRequest& request : stopped) rank.extraction.add(request.id);
  if (rank.extraction.program().extractions.empty()) return {};
  Stopwatch watch;
  LS_RETURN_IF_ERROR(rank.memory.backend.execute(rank.extraction.program(), rank.readback));
  summary_->seconds.execute += watch.lap();
  auto compared = rank.extraction.compare(rank.readback);
  summary_->seconds.compare += watch.lap();
  return compared;
}

// Only called with a single rank, whose rows are complete.
Checked HiddenStateCheck::keep(Rank& rank, std::int64_t now_ns) {
  if (rank.extraction.program().extractions.empty()) return {};
  const std::vector<HiddenStates> extracted = rank.extraction.states(rank.readback);
  for (const HiddenStates& states : extracted)
    files_.save(now_ns, rank.memory.program.step, states);
  if (!sink_ || extracted.empty()) return {};
  LS_RETURN_IF_ERROR(sink_(extracted));
  return {};
}

Checked HiddenStateCheck::finish(bool agreed) {
  for (const Rank& rank : ranks_) summary_->rows_extracted += rank.extraction.rows_compared();
  // After a finding, files that never appear are a consequence.
  if (!agreed) return {};
  LS_RETURN_UNLESS_FINE(files_.finish());
  summary_->hidden_files_seen += files_.num_seen();
  if (ranks_.size() > 1 && summary_->rows_extracted > 0)
    summary_->not_checked.push_back(
        "files of hidden states: every rank reads only its own part from the cache");
  return {};
}

std::vector<std::string> HiddenStateCheck::not_checked() const {
  const std::int64_t without_a_row = ranks_.front().extraction.requests_without_a_row();
  if (without_a_row == 0) return {};
  return {fmt::format("hidden states of {} requests that ended while preempted", without_a_row)};
}

}  // namespace lockstep
