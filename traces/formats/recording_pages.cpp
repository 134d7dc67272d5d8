// HiSparse's pages in a recording: what a step tells workers, and what they report.
#include <fmt/format.h>

#include "reference/plan/limits.h"
#include "traces/formats/lines_json.h"
#include "traces/formats/spec_json.h"

namespace lockstep {

std::vector<BlockId> read_blocks(JsonValue value, std::int64_t num_blocks) {
  std::vector<BlockId> blocks;
  const JsonArray array = value.array();
  blocks.reserve(array.size());
  for (JsonValue block : array)
    blocks.push_back(BlockId{block.integer<std::int32_t>(0, num_blocks - 1)});
  return blocks;
}

void write_blocks(JsonWriter& out, const std::vector<BlockId>& blocks) {
  out.begin_array();
  for (const BlockId block : blocks) out.integer(index_of(block));
  out.end_array();
}

namespace {

constexpr std::int64_t kNumberMax = std::int64_t{1} << 40;

BlockId read_block(JsonValue value, std::int64_t num_blocks) {
  return BlockId{value.integer<std::int32_t>(0, num_blocks - 1)};
}

// A list of that many elements; false: it is another.
bool has_size(JsonValue value, std::size_t size, std::string_view expected) {
  if (value.array().size() == size) return true;
  value.refuse(expected);
  return false;
}

PageTransfer read_transfer(JsonValue value, const RecordingHeader& header) {
  PageTransfer transfer;
  if (!has_size(value, 4, "[number, host block, [blocks], \"spill\" or \"restore\"]"))
    return transfer;
  const JsonArray parts = value.array();
  constexpr JsonWord<bool> kWays[] = {{"spill", false}, {"restore", true}};
  transfer.id = parts[0].integer(0, kNumberMax);
  transfer.host = read_block(parts[1], header.options.config.hisparse_host_num_blocks);
  transfer.resident = read_blocks(parts[2], header.num_blocks);
  transfer.restores = parts[3].word<bool>(kWays);
  return transfer;
}

RowMirror read_mirror(JsonValue value) {
  RowMirror mirror;
  if (!has_size(value, 3, "[[first rows], first host row, rows]")) return mirror;
  const JsonArray parts = value.array();
  for (JsonValue row : parts[0].array()) mirror.sources.push_back(row.integer(0, kNumberMax));
  mirror.destination = parts[1].integer(0, kNumberMax);
  mirror.num_rows = parts[2].integer<std::int32_t>(1, kTokensMax);
  return mirror;
}

ResidencyUpdate read_residency(JsonValue value, const RecordingHeader& header) {
  ResidencyUpdate update;
  if (!has_size(value, 2, "[[pages], [[blocks], ...]]")) return update;
  const JsonArray parts = value.array();
  for (JsonValue page : parts[0].array())
    update.pages.push_back(page.integer<std::int32_t>(0, kTokensMax));
  for (JsonValue blocks : parts[1].array()) {
    update.blocks.push_back(read_blocks(blocks, header.num_blocks));
    if (update.blocks.back().size() != update.pages.size())
      blocks.refuse(fmt::format("a block for each of the {} pages", update.pages.size()));
  }
  return update;
}

}  // namespace

std::vector<TransferCount> read_transfer_counts(JsonValue value) {
  std::vector<TransferCount> counts;
  for (JsonValue element : value.array()) {
    if (!has_size(element, 2, "[number, workers]")) break;
    const JsonArray pair = element.array();
    counts.push_back(
        {pair[0].integer(0, kNumberMax), pair[1].integer<std::int32_t>(1, kTokensMax)});
  }
  return counts;
}

RecordedPages read_pages(JsonValue value, const RecordingHeader& header) {
  JsonObject object = value.object();
  RecordedPages pages;
  for (JsonValue transfer : object.required("transfers").array())
    pages.transfers.push_back(read_transfer(transfer, header));
  for (auto& [id, mirrors] : object.required("mirrors").object().entries()) {
    auto& row = pages.mirrors.emplace_back(std::string(id), std::vector<RowMirror>{});
    for (JsonValue mirror : mirrors.array()) row.second.push_back(read_mirror(mirror));
  }
  pages.all_resident = object.required("all_resident").boolean();
  for (auto& [id, update] : object.required("residency").object().entries())
    pages.residency.emplace_back(std::string(id), read_residency(update, header));
  pages.free_host_blocks = object.required("free_host_blocks")
                               .integer(0, header.options.config.hisparse_host_num_blocks);
  object.finish();
  return pages;
}

void write_transfer_counts(JsonWriter& out, const std::vector<TransferCount>& counts) {
  out.begin_array();
  for (const TransferCount& count : counts)
    out.begin_array().integer(count.id).integer(count.count).end_array();
  out.end_array();
}

void write_pages(JsonWriter& out, const RecordedPages& pages) {
  out.begin_object().key("transfers").begin_array();
  for (const PageTransfer& transfer : pages.transfers) {
    out.begin_array().integer(transfer.id).integer(index_of(transfer.host));
    write_blocks(out, transfer.resident);
    out.string(transfer.restores ? "restore" : "spill").end_array();
  }
  out.end_array().key("mirrors").begin_object();
  for (const auto& [id, mirrors] : pages.mirrors) {
    out.key(id).begin_array();
    for (const RowMirror& mirror : mirrors) {
      out.begin_array().integers(mirror.sources);
      out.integer(mirror.destination).integer(mirror.num_rows).end_array();
    }
    out.end_array();
  }
  out.end_object().boolean("all_resident", pages.all_resident).key("residency").begin_object();
  for (const auto& [id, update] : pages.residency) {
    out.key(id).begin_array().integers(update.pages).begin_array();
    for (const std::vector<BlockId>& blocks : update.blocks) write_blocks(out, blocks);
    out.end_array().end_array();
  }
  out.end_object().integer("free_host_blocks", pages.free_host_blocks).end_object();
}

}  // namespace lockstep
