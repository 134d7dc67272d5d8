// The recorder: JSON is assembled as text, since the library has no dependencies. Keys and their
// order are those of docs/formats.md, "Engine recording".
#include "traces/recorder/recorder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <numeric>

namespace lockstep::recorder {
namespace {

// Quotes a text for JSON. Bytes from 0x80 on are copied: names are expected to be UTF-8, and
// readers refuse anything else.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      out += std::string("\\u00") + kDigits[c >> 4] + kDigits[c & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Returns "[...]" with the result of `write` for each element.
template <class List, class Write>
std::string list_of(const List& list, Write write) {
  std::string out = "[";
  for (const auto& element : list) out += (out.size() > 1 ? "," : "") + write(element);
  return out + "]";
}

std::string numbers(const std::vector<std::int32_t>& list) {
  return list_of(list, [](std::int32_t number) { return std::to_string(number); });
}

std::string names(const std::vector<std::string>& list) { return list_of(list, quoted); }

std::string tables(const std::vector<std::vector<std::int32_t>>& groups) {
  return list_of(groups, numbers);
}

// A key with its value, without a comma.
std::string key(const char* name, const std::string& json) { return quoted(name) + ":" + json; }
std::string key(const char* name, std::int64_t number) { return key(name, std::to_string(number)); }
std::string flag(const char* name, bool value) { return key(name, value ? "true" : "false"); }

// Windows and chunks of 0 are omitted: readers refuse a size of 0.
std::string group_json(const Group& group) {
  std::string spec = key("type", quoted(group.kind)) + "," + key("block_size", group.block_size) +
                     "," + key("num_kv_heads", group.num_kv_heads) + "," +
                     key("head_size", group.head_size) + "," + key("dtype", quoted(group.dtype));
  if (group.sliding_window > 0) spec += "," + key("sliding_window", group.sliding_window);
  if (group.attention_chunk_size > 0)
    spec += "," + key("attention_chunk_size", group.attention_chunk_size);
  return "{" + key("layers", names(group.layers)) + "," + key("spec", "{" + spec + "}") + "}";
}

std::string header_json(const Engine& engine) {
  // vLLM derives both block sizes: the scheduler's unit is the least common multiple of the groups'
  // blocks, that of hashes their greatest common divisor. A block of 0 tokens counts as 1 here;
  // readers refuse the header anyway.
  std::int64_t multiple = 1, divisor = 0;
  for (const Group& group : engine.groups) {
    multiple = std::lcm(multiple, std::int64_t{std::max(group.block_size, 1)});
    divisor = std::gcd(divisor, std::int64_t{std::max(group.block_size, 1)});
  }
  // Only options that this interface has; the others keep their defaults in readers.
  const std::string config =
      key("max_num_seqs", engine.max_num_seqs) + "," +
      key("max_num_batched_tokens", engine.max_num_batched_tokens) + "," +
      key("max_model_len", engine.max_model_len) + "," +
      key("block_size", engine.groups.empty() ? 16 : engine.groups.front().block_size) + "," +
      flag("enable_prefix_caching", engine.enable_prefix_caching) + "," +
      flag("enable_chunked_prefill", engine.enable_chunked_prefill) + "," +
      flag("async_scheduling", engine.async_scheduling) +
      (engine.num_spec_tokens == 0 ? ""
                                   : "," + key("num_spec_tokens", engine.num_spec_tokens) + "," +
                                         key("spec_method", quoted(engine.spec_method)));
  const std::string who =
      key("name", quoted(engine.name)) + "," + key("version", quoted(engine.version));
  return "{\"schedule_recording\":1," + key("engine", "{" + who + "}") + "," +
         key("family", quoted(engine.model)) + ",\"seed\":0," + key("config", "{" + config + "}") +
         "," + key("groups", list_of(engine.groups, group_json)) + "," +
         key("num_blocks", engine.num_blocks) + "," + key("scheduler_block_size", multiple) + "," +
         key("hash_block_size", std::max<std::int64_t>(divisor, 1)) +
         (engine.tells_held_drafts ? "," + key("held_drafts", 1) : "") +
         (engine.tells_stale_outputs ? "," + key("stale_outputs", 1) : "") + "}";
}

// `blocks` is always present, as null where no group got a block.
std::string scheduled_json(const Scheduled& row) {
  std::string out = "{" + key("id", quoted(row.id)) + "," + key("tokens", row.tokens);
  if (row.is_new) out += "," + flag("new", true);
  if (row.resumed) out += "," + flag("resumed", true);
  out += "," + key("computed", row.computed) + "," +
         key("blocks", row.blocks.empty() ? "null" : tables(row.blocks));
  if (!row.spec.empty()) out += "," + key("spec", numbers(row.spec));
  return out + "}";
}

std::string item_json(const PromptItem& item) {
  return "{" + key("id", quoted(item.id)) + "," + key("kind", quoted(item.kind)) + "," +
         key("at", item.at) + "," + key("n", item.n) + "}";
}

// Optional keys of `add`, each with a leading comma.
std::string keys_json(const Keys& keys) {
  std::string out;
  if (!keys.cache_salt.empty()) out += "," + key("cache_salt", quoted(keys.cache_salt));
  if (!keys.lora.name.empty())
    out += "," +
           key("lora", "{" + key("name", quoted(keys.lora.name)) + "," + key("id", keys.lora.id) +
                           "," + key("path", quoted(keys.lora.path)) + "}");
  if (!keys.mm.empty()) out += "," + key("mm", list_of(keys.mm, item_json));
  if (!keys.embeds.digests.empty())
    out += "," + key("embeds", "{" + key("digest_tokens", keys.embeds.digest_tokens) + "," +
                                   key("digests", list_of(keys.embeds.digests, quoted)) + "}");
  return out;
}

std::string stale_json(const StaleOutput& output) {
  return "{" + key("id", quoted(output.id)) + "," + key("of_step", output.of_step) + "," +
         key("taken", output.taken) + "}";
}

// True if the items are in order, inside the prompt and without overlap, and have names, as readers
// require. The sum is 64 bits wide, so that at + n cannot wrap.
bool are_in_order(const std::vector<PromptItem>& items, std::size_t prompt_size) {
  std::int64_t end = 0;
  for (const PromptItem& item : items) {
    if (item.id.empty() || item.kind.empty() || item.at < end || item.n < 1) return false;
    end = std::int64_t{item.at} + item.n;
  }
  return end <= static_cast<std::int64_t>(prompt_size);
}

// Returns {"r0":..,"r1":..}, in the order of `list`.
template <class List, class Write>
std::string by_request(const List& list, Write write) {
  std::string out;
  for (const auto& [id, value] : list)
    out += (out.empty() ? "" : ",") + quoted(id) + ":" + write(value);
  return "{" + out + "}";
}

}  // namespace

Recorder::Recorder(const std::string& path, const Engine& engine)
    : path_(path),
      num_groups_(engine.groups.size()),
      tells_held_drafts_(engine.tells_held_drafts),
      tells_stale_outputs_(engine.tells_stale_outputs) {
  // A symbolic link is resolved, so that renaming does not replace the link by a file. A device or
  // a FIFO is written directly and never replaced.
  std::error_code error;
  if (std::filesystem::is_symlink(path, error))
    path_ = std::filesystem::weakly_canonical(path, error);
  written_ = path_;
  if (!std::filesystem::exists(path_, error) || std::filesystem::is_regular_file(path_, error))
    written_ += ".partial";
  file_ = std::fopen(written_.c_str(), "w");
  if (file_ == nullptr) {
    error_ = written_ + ": " + std::strerror(errno);
    return;
  }
  write(header_json(engine));
}

Recorder::~Recorder() {
  if (file_ != nullptr) std::fclose(file_);
}

// Writes a line and flushes it, so that a killed process loses only the step in progress. An error
// closes the file and keeps the system's message.
void Recorder::write(const std::string& line) {
  if (file_ == nullptr) return;
  if (std::fwrite(line.data(), 1, line.size(), file_) == line.size() &&
      std::fputc('\n', file_) != EOF && std::fflush(file_) == 0)
    return;
  error_ = written_ + ": " + std::strerror(errno);
  std::fclose(file_);
  file_ = nullptr;
}

// Ends the recording because of the caller's data; PATH.partial stays. The first error remains.
void Recorder::refuse(const std::string& what) {
  if (file_ == nullptr) return;
  error_ = what;
  std::fclose(std::exchange(file_, nullptr));
}

void Recorder::add(const std::string& id, const std::vector<std::int32_t>& prompt,
                   std::int32_t max_tokens, const Keys& keys, const EndTokens& ends) {
  if (prompt.empty() || max_tokens < 1)
    refuse("request " + id + ": " + std::to_string(prompt.size()) + " prompt tokens, max_tokens " +
           std::to_string(max_tokens) + "; both are at least 1");
  if (!are_in_order(keys.mm, prompt.size()))
    refuse("request " + id + ": images out of order or beyond the prompt of " +
           std::to_string(prompt.size()) + " tokens");
  const auto each = static_cast<std::size_t>(std::max(keys.embeds.digest_tokens, 1));
  const std::size_t num_digests = (prompt.size() + each - 1) / each;
  if (!keys.embeds.digests.empty() && keys.embeds.digests.size() != num_digests)
    refuse("request " + id + ": " + std::to_string(keys.embeds.digests.size()) +
           " digests of embeddings; a prompt of " + std::to_string(prompt.size()) + " tokens has " +
           std::to_string(num_digests));
  // No audit depends on the time of arrival, only on the order of calls; it counts requests, so
  // that the recording is the same in every run.
  before_ += std::string(before_.empty() ? "" : ",") + "{" + key("add", quoted(id)) + "," +
             key("prompt", "{" + key("tokens", numbers(prompt)) + "}") + "," +
             key("max_tokens", max_tokens) + "," +
             key("arrival", std::to_string(num_requests_++) + ".0") + keys_json(keys);
  if (ends.eos >= 0) before_ += "," + key("eos", ends.eos);
  if (!ends.stop_token_ids.empty())
    before_ += "," + key("stop_token_ids", numbers(ends.stop_token_ids));
  before_ += "}";
}

void Recorder::leave(const std::string& id) {
  before_ += std::string(before_.empty() ? "" : ",") + "{" + key("abort", quoted(id)) + "}";
}

// Refuses what readers would refuse in the whole file: lists of another number of groups, and keys
// that the header does not announce.
void Recorder::check(const Step& step) {
  const std::string place = "step " + std::to_string(num_steps_);
  for (const Scheduled& row : step.scheduled)
    if (!row.blocks.empty() && row.blocks.size() != num_groups_)
      refuse(place + ", request " + row.id + ": blocks of " + std::to_string(row.blocks.size()) +
             " groups; the engine has " + std::to_string(num_groups_));
  if (!step.held_drafts.empty() && !tells_held_drafts_)
    refuse(place + ": held_drafts of an engine that does not report them (tells_held_drafts)");
  if (!step.stale_outputs.empty() && !tells_stale_outputs_)
    refuse(place + ": stale_outputs of an engine that does not report them (tells_stale_outputs)");
}

void Recorder::step(const Step& step) {
  check(step);
  std::string line = "{" + key("step", num_steps_++);
  if (!before_.empty()) line += "," + key("before", "[" + std::exchange(before_, {}) + "]");
  line += "," + key("scheduled", list_of(step.scheduled, scheduled_json));
  if (!step.preempted.empty()) line += "," + key("preempted", names(step.preempted));
  if (!step.finished.empty()) line += "," + key("finished", names(step.finished));
  line += "," + key("running", names(step.running)) + "," + key("waiting", names(step.waiting)) +
          "," + key("free_blocks", step.free_blocks);
  // Readers require ascending names, which make the bytes unique.
  if (!step.held_drafts.empty()) {
    TokensByRequest held = step.held_drafts;
    std::sort(held.begin(), held.end());
    line += "," + key("held_drafts", by_request(held, numbers));
  }
  if (!step.tables.empty()) line += "," + key("tables", by_request(step.tables, tables));
  line += "," + key("sampled", by_request(step.sampled, numbers));
  if (step.output_of_step >= 0) line += "," + key("output_of_step", step.output_of_step);
  if (!step.stale_outputs.empty())
    line += "," + key("stale_outputs", list_of(step.stale_outputs, stale_json));
  if (!step.stopped.empty())
    line += "," + key("stopped", list_of(step.stopped, [](const auto& end) {
                        return "[" + quoted(end.first) + "," + quoted(end.second) + "]";
                      }));
  if (!step.drafts.empty()) line += "," + key("drafts", by_request(step.drafts, numbers));
  write(line + "}");
}

// Renames the file only after a successful close: a full disk is often reported there.
void Recorder::end(std::vector<std::string> unfinished) {
  std::sort(unfinished.begin(), unfinished.end());
  write("{\"end\":true," + key("steps", num_steps_) + "," + key("unfinished", names(unfinished)) +
        "}");
  if (file_ == nullptr) return;
  const bool is_whole = std::fclose(std::exchange(file_, nullptr)) == 0;
  if (!is_whole || (written_ != path_ && std::rename(written_.c_str(), path_.c_str()) != 0))
    error_ = path_ + ": " + std::strerror(errno);
}

}  // namespace lockstep::recorder
