#include "sim/worker/worker_protocol.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json_writer.h"
#include "base/line_reader.h"
#include "traces/formats/engine_options.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/safetensors.h"

namespace lockstep {
namespace {

// Reads an array; `read` converts each entry.
template <class Read>
auto list(JsonValue value, const Read& read) {
  std::vector<decltype(read(value))> made;
  for (JsonValue entry : value.array()) made.push_back(read(entry));
  return made;
}

template <class T>
std::vector<T> integers(JsonValue value) {
  return list(value, [](JsonValue entry) { return entry.integer<T>(); });
}

std::vector<std::vector<std::int32_t>> tables(JsonValue value) {
  return list(value, integers<std::int32_t>);
}

std::vector<std::string> strings(JsonValue value) {
  return list(value, [](JsonValue entry) { return std::string(entry.string()); });
}

// shape: [blocks, tokens, heads, bytes of a row]; stride: bytes per block, token and head. A row is
// contiguous, so it has no stride of its own.
WorkerView view_of(JsonValue value) {
  JsonObject said = value.object();
  WorkerView view;
  view.offset = said.required("offset").integer();
  const auto shape = integers<std::int64_t>(said.required("shape"));
  const auto stride = integers<std::int64_t>(said.required("stride"));
  if (shape.size() != 4 || stride.size() != 3) {
    said.refuse_because("expected a shape of 4 and a stride of 3 numbers");
    return view;
  }
  view.blocks = shape[0];
  view.tokens = shape[1];
  view.heads = shape[2];
  view.row_bytes = shape[3];
  view.block_stride = stride[0];
  view.token_stride = stride[1];
  view.head_stride = stride[2];
  said.finish();
  return view;
}

// shape: [blocks, bytes of a block's state]; stride: bytes from block to block.
WorkerState state_of(JsonValue value) {
  JsonObject said = value.object();
  WorkerState state;
  state.offset = said.required("offset").integer();
  const auto shape = integers<std::int64_t>(said.required("shape"));
  state.block_stride = said.required("stride").integer();
  if (shape.size() != 2) {
    said.refuse_because("expected a shape of 2 numbers");
    return state;
  }
  state.blocks = shape[0];
  state.bytes = shape[1];
  said.finish();
  return state;
}

WorkerLayer layer_of(JsonValue value) {
  JsonObject said = value.object();
  WorkerLayer layer;
  layer.name = said.required("name").string();
  layer.page_offset = said.required("page_offset").integer();
  layer.page_stride = said.required("page_stride").integer(1);
  layer.parts = list(said.required("parts"), view_of);
  if (JsonValue states = said.optional("states")) layer.states = list(states, state_of);
  said.finish();
  return layer;
}

void write_sampled(JsonWriter& out, const WorkerStep& step) {
  out.begin_object();
  for (const auto& [name, tokens] : step.sampled) out.key(name).integers(tokens);
  out.end_object();
}

// A new request carries its prompt; a resumed one does not, since the worker still has it.
void write_row(JsonWriter& out, const WorkerRow& row) {
  const ScheduledRequest& scheduled = *row.scheduled;
  out.begin_object().string("id", row.name).integer("tokens", scheduled.num_tokens);
  out.integer("computed", scheduled.computed).integer("known", row.num_known);
  if (scheduled.is_new) out.boolean("new", true).integer("max_tokens", row.spec->max_tokens);
  if (scheduled.is_resumed) out.boolean("resumed", true);
  if (scheduled.is_new && !scheduled.is_resumed)
    out.key("prompt").integers(row.spec->prompt.materialize());
  out.key("blocks").each(row.blocks, [&](const auto& blocks) { out.integers(blocks); });
  if (!row.drafts.empty()) out.key("spec").integers(row.drafts);
  out.key("contents").each(row.contents, [&](std::uint64_t content) { out.uint64(content); });
  out.end_object();
}

}  // namespace

// The engine's keys are those of a recording's header, so one reader serves both.
std::string worker_open_message(const RecordingHeader& header, std::string_view memory,
                                std::span<const std::int64_t> kernel_block_sizes) {
  return object_line([&](JsonWriter& out) {
    write_engine_keys(out.key("open").begin_object(), header);
    if (!kernel_block_sizes.empty()) out.key("kernel_block_sizes").integers(kernel_block_sizes);
    out.string("memory", memory).end_object();
  });
}

// One message has everything of a step, with the tokens that the previous step sampled.
std::string worker_step_message(const WorkerStep& step) {
  return object_line([&](JsonWriter& out) {
    write_sampled(out.integer("execute", step.step).key("sampled"), step);
    out.key("scheduled").each(step.rows, [&](const WorkerRow& row) { write_row(out, row); });
    out.key("finished").strings(step.finished).key("preempted").strings(step.preempted);
    out.key("zero").integers(step.zero).key("copies");
    out.each(step.copies, [&](const KVCacheBlockCopy& copy) {
      out.integers(std::array{copy.from, copy.to});
    });
  });
}

std::string worker_sample_message(const WorkerStep& step) {
  return object_line([&](JsonWriter& out) { write_sampled(out.key("sample"), step); });
}

std::string worker_extract_message(std::span<const SavedStates> wanted) {
  return object_line([&](JsonWriter& out) {
    out.key("extract").each(wanted, [&](const SavedStates& one) {
      out.begin_object().string("id", one.request).string("layer", one.layer);
      out.integer("tokens", one.num_tokens).end_object();
    });
  });
}

// The version is read with itself as both limits, so a different version is an error of the reply.
EngineHello read_hello_of(JsonObject& object, std::string_view protocol, std::int64_t version) {
  EngineHello hello;
  JsonObject said = object.required("hello").object();
  said.required(protocol).integer(version, version);
  hello.engine = read_recorded_engine(said.required("engine"));
  hello.features = strings(said.required("features"));
  said.finish();
  return hello;
}

// A refusal comes alone; the caller turns it into an error of the configuration.
WorkerOpened read_worker_opened(JsonObject& object) {
  WorkerOpened opened;
  if (JsonValue refused = object.optional("refused")) {
    opened.refused = refused.nonempty_string();
    return opened;
  }
  JsonObject said = object.required("opened").object();
  opened.bytes = said.required("bytes").integer(1);
  opened.order = said.required("order").string();
  opened.layers = list(said.required("layers"), layer_of);
  said.finish();
  return opened;
}

WorkerFacts read_worker_facts(JsonObject& object) {
  WorkerFacts facts;
  JsonObject said = object.required("executed").object();
  facts.rows = strings(said.required("rows"));
  facts.num_tokens = integers<std::int32_t>(said.required("num_tokens"));
  facts.positions = integers<std::int64_t>(said.required("positions"));
  for (JsonValue value : said.required("groups").array()) {
    JsonObject group = value.object();
    WorkerGroupFacts& read = facts.groups.emplace_back();
    read.tables = tables(group.required("tables"));
    read.slots = integers<Slot>(group.required("slots"));
    if (const JsonValue reads = group.optional("reads")) read.reads = tables(reads);
    group.finish();
  }
  facts.faults = strings(said.required("faults"));
  said.finish();
  return facts;
}

std::vector<std::string> read_worker_extracted(JsonObject& object) {
  JsonObject said = object.required("extracted").object();
  std::vector<std::string> files = strings(said.required("files"));
  said.finish();
  return files;
}

// Reads the file that the engine's own connector has written, as a trainer would.
Result<void> append_saved_states(const std::string& file, std::vector<std::uint8_t>& rows) {
  LS_ASSIGN_OR_RETURN(ByteSource source, ByteSource::open(file));
  std::string text;
  for (bool more = true; more;) {
    LS_ASSIGN_OR_RETURN(more, source.read_more(text));
  }
  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  LS_ASSIGN_OR_RETURN(const std::vector<SafeTensor> tensors, read_safetensors(bytes));
  const auto states = std::ranges::find(tensors, "hidden_states", &SafeTensor::name);
  if (states == tensors.end()) return fail(fmt::format("{}: no tensor hidden_states", file));
  rows.insert(rows.end(), states->bytes.begin(), states->bytes.end());
  return {};
}

std::vector<std::string> read_worker_sampled(JsonObject& object) {
  JsonObject said = object.required("sampled").object();
  std::vector<std::string> faults = strings(said.required("faults"));
  said.finish();
  return faults;
}

}  // namespace lockstep
