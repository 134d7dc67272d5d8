#include "sim/report/cache_event_text.h"

#include "base/hex_text.h"
#include "base/json_writer.h"

namespace lockstep {
namespace {

void write_hashes(JsonWriter& out, const CacheEvent& event) {
  out.key("block_hashes").begin_array();
  for (const ExternalBlockHash& hash : event.block_hashes) out.string(hex_digits(hash));
  out.end_array();
}

void write_stored(JsonWriter& out, const CacheEvent& event) {
  write_hashes(out, event);
  out.key("parent_block_hash");
  if (event.parent)
    out.string(hex_digits(*event.parent));
  else
    out.null();
  out.key("token_ids").integers(event.token_ids).integer("block_size", event.block_size);
  out.key("extra_keys").begin_array();
  for (const auto& key : event.extra_keys) {
    if (key)
      out.string(*key);
    else
      out.null();
  }
  out.end_array();
}

}  // namespace

std::string cache_events_line(std::int64_t step, std::span<const CacheEvent> events) {
  if (events.empty()) return {};
  JsonWriter out;
  out.begin_object().integer("step", step).key("events").begin_array();
  for (const CacheEvent& event : events) {
    out.begin_object();
    switch (event.kind) {
      case CacheEvent::Kind::stored:
        out.string("type", "BlockStored").integer("group_idx", event.group);
        write_stored(out, event);
        break;
      case CacheEvent::Kind::removed:
        out.string("type", "BlockRemoved").integer("group_idx", event.group);
        write_hashes(out, event);
        break;
      case CacheEvent::Kind::cleared:
        out.string("type", "AllBlocksCleared");
        break;
    }
    out.end_object();
  }
  out.end_array().end_object();
  return out.take_line();
}

}  // namespace lockstep
