// The report of a fuzz run as one line of JSON, and back.
#include <fmt/core.h>

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "base/line_reader.h"
#include "properties/fuzz/fuzz.h"

namespace lockstep {
namespace {

constexpr std::int64_t kReportVersion = 2;

constexpr JsonWord<OutcomeKind> kKinds[] = {{"divergence", OutcomeKind::divergence},
                                            {"violation", OutcomeKind::violation},
                                            {"stuck", OutcomeKind::stuck},
                                            {"harness", OutcomeKind::harness}};

void write_counts(JsonWriter& out, const FuzzReport& report) {
  for (const auto& [name, count] : kFuzzCounts) {
    out.integer(name, report.*count);
    if (count != &FuzzReport::refused) continue;
    out.key("first_refused_seed").uint64(report.first_refused_seed);
    out.string("first_refusal", report.first_refusal);
  }
  out.key("state_hash").begin_array();
  out.uint64(report.state_hash.high).uint64(report.state_hash.low).end_array();
  out.key("tally").begin_object();
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    out.integer(name_of(reached), report.tally[reached]);
  }
  out.end_object();
}

void read_counts(JsonObject& object, FuzzReport& report) {
  for (const auto& [name, count] : kFuzzCounts) report.*count = object.required(name).integer(0);
  report.first_refused_seed = object.required("first_refused_seed").uint64();
  report.first_refusal = object.required("first_refusal").string();
  JsonValue hash = object.required("state_hash");
  std::vector<std::uint64_t> words;
  for (JsonValue word : hash.array()) words.push_back(word.uint64());
  if (words.size() == 2)
    report.state_hash = {.high = words[0], .low = words[1]};
  else
    hash.refuse("two numbers");
  JsonObject tally = object.required("tally").object();
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto reached = static_cast<Reached>(i);
    report.tally.count(reached, tally.required(name_of(reached)).integer(0));
  }
  tally.finish();
}

void write_known(JsonWriter& out, const std::map<std::string, KnownCases>& known) {
  out.begin_object();
  for (const auto& [name, cases] : known) {
    out.key(name).begin_object().integer("cases", cases.cases);
    out.key("first_seed").uint64(cases.first_seed).end_object();
  }
  out.end_object();
}

void read_known(JsonValue value, std::map<std::string, KnownCases>& known) {
  for (auto& [name, entry] : value.object().entries()) {
    JsonObject cases = entry.object();
    known[std::string(name)] = {.cases = cases.required("cases").integer(1),
                                .first_seed = cases.required("first_seed").uint64()};
    cases.finish();
  }
}

void write_failure(JsonWriter& out, const FuzzFailure& failure) {
  out.begin_object().key("seed").uint64(failure.seed);
  out.string("kind", name_of(failure.kind)).string("check", failure.check);
  out.integer("step", failure.step).string("request", failure.request);
  out.string("what", failure.what).integer("steps", failure.steps).end_object();
}

FuzzFailure read_failure(JsonValue value) {
  JsonObject object = value.object();
  FuzzFailure failure;
  failure.seed = object.required("seed").uint64();
  failure.kind = object.required("kind").word<OutcomeKind>(kKinds);
  failure.check = object.required("check").string();
  failure.step = object.required("step").integer(-1);
  failure.request = object.required("request").string();
  failure.what = object.required("what").string();
  if (auto steps = object.optional("steps")) failure.steps = steps.integer(0);
  object.finish();
  return failure;
}

FuzzReport read_report(JsonValue value) {
  JsonObject object = value.object();
  FuzzReport report;
  object.required("lockstep_fuzz").integer(kReportVersion, kReportVersion);
  report.engine = object.required("engine").string();
  if (auto decided_by = object.optional("decided_by")) report.decided_by = decided_by.string();
  if (auto worked_by = object.optional("worked_by")) report.worked_by = worked_by.string();
  report.backend = object.required("backend").string();
  report.mutant = object.required("mutant").string();
  if (auto again = object.optional("again")) report.again = again.string();
  if (auto interrupted = object.optional("interrupted")) report.interrupted = interrupted.boolean();
  report.first_seed = object.required("first_seed").uint64();
  report.runs = object.required("runs").integer(0);
  report.shards = object.required("shards").integer(1, 1 << 20);
  report.shard = object.required("shard").integer(0, report.shards - 1);
  read_counts(object, report);
  read_known(object.required("known"), report.known);
  if (auto refusals = object.optional("refusals")) read_known(refusals, report.refusals);
  for (JsonValue failure : object.required("failures").array())
    report.failures.push_back(read_failure(failure));
  for (const char* follows : {"buckets", "not_checked"}) object.optional(follows);
  object.finish();
  return report;
}

}  // namespace

std::string fuzz_report_to_json(const FuzzReport& report) {
  JsonWriter out;
  out.begin_object().integer("lockstep_fuzz", kReportVersion);
  out.string("engine", report.engine);
  if (!report.decided_by.empty()) out.string("decided_by", report.decided_by);
  if (!report.worked_by.empty()) out.string("worked_by", report.worked_by);
  out.string("backend", report.backend);
  out.string("mutant", report.mutant).key("first_seed").uint64(report.first_seed);
  if (!report.again.empty()) out.string("again", report.again);
  out.integer("runs", report.runs).integer("shards", report.shards);
  out.integer("shard", report.shard);
  write_counts(out, report);
  write_known(out.key("known"), report.known);
  write_known(out.key("refusals"), report.refusals);
  out.key("failures").begin_array();
  for (const FuzzFailure& failure : report.failures) write_failure(out, failure);
  out.end_array().key("buckets").begin_array();
  for (const FuzzBucket& bucket : report.buckets()) {
    out.begin_object().string("bucket", bucket.name).integer("cases", bucket.cases);
    out.key("first_seed").uint64(bucket.first->seed);
    out.key("smallest_seed").uint64(bucket.smallest->seed).end_object();
  }
  out.end_array().key("not_checked").strings(report.not_checked()).end_object();
  return out.take_line();
}

namespace {

Result<FuzzReport> report_of(const std::string& name, std::string_view line, std::int64_t number,
                             bool is_cut_off) {
  JsonReader json(name);
  FuzzReport report;
  if (json.parse(line, number, is_cut_off)) report = read_report(json.root());
  if (!json.ok()) return json.failure();
  return report;
}

}  // namespace

Result<FuzzReport> fuzz_report_from_text(const std::string& name, std::string_view line) {
  return report_of(name, line.substr(0, line.find('\n')), 1, false);
}

Result<FuzzReport> read_fuzz_report(const std::string& path) {
  LS_ASSIGN_OR_RETURN(auto lines, LineReader::open(path));
  std::string_view line;
  LS_ASSIGN_OR_RETURN(const auto got, lines.next(line));
  if (!got) return fail(fmt::format("{}: empty; expected the report of a fuzz run", path));
  return report_of(path, line, lines.number(), lines.is_cut_off());
}

}  // namespace lockstep
