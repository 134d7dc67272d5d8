// The table of a run's options: what a saved case says, in today's words and in older numbers.
#include "traces/formats/run_fields.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "tests/traces/text_files.h"
#include "traces/formats/saved_case.h"

namespace lockstep {
namespace {

Result<SavedCase> with_settings(const std::string& settings) {
  return saved_case_from_text(
      "FILE", testing_files::changed(saved_case_to_text(testing_files::smallest_case()),
                                     "\"settings\":{}", "\"settings\":" + settings));
}

TEST(RunFields, EachHasANameOfItsOwnAndEachFlagOneRow) {
  std::set<std::string_view> names, flags;
  for (const RunField& field : run_fields()) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    if (!field.old_name.empty()) {
      EXPECT_TRUE(names.insert(field.old_name).second) << field.old_name;
    }
    for (const std::string_view flag : {field.flag, field.no_flag})
      if (!flag.empty()) {
        EXPECT_TRUE(flags.insert(flag).second) << flag;
      }
    EXPECT_EQ(field.flag.empty() && field.no_flag.empty(), field.group.empty()) << field.name;
  }
}

TEST(RunFields, ASettingAtItsDefaultIsLeftOut) {
  EXPECT_NE(saved_case_to_text(testing_files::smallest_case()).find("\"settings\":{}"),
            std::string::npos);
  SavedCase saved = testing_files::smallest_case();
  saved.num_streams = 4;
  saved.delay_streams = true;
  saved.numbers = Numbers::real;
  saved.connector.parts = {ConnectorKind::host, ConnectorKind::peers};
  EXPECT_NE(saved_case_to_text(saved).find("\"settings\":{\"connector\":\"host+peers\","
                                           "\"num_streams\":4,\"delay_streams\":true,"
                                           "\"numbers\":\"real\"}"),
            std::string::npos)
      << saved_case_to_text(saved);
}

TEST(RunFields, OlderCasesHaveNumbersForSwitchesWordsAndConnectors) {
  const auto old =
      with_settings(R"({"delay_streams":1,"real_numbers":1,"enforce_eager":0,"connector":213,)"
                    R"("load_failed_percent":-1,"transfer_delay_steps":8,"load_failure_fails":1})");
  ASSERT_TRUE(old) << old.error().message;
  SavedCase expected = testing_files::smallest_case();
  expected.delay_streams = true;
  expected.numbers = Numbers::real;
  expected.connector = {
      .parts = {ConnectorKind::host, ConnectorKind::peers, ConnectorKind::one_group_peers},
      .load_failed_percent = {},
      .delay_steps_max = 8,
      .load_failure_policy = KVLoadFailurePolicy::fail};
  EXPECT_EQ(*old, expected);
}

TEST(RunFields, ASettingThatIsNoneIsRefused) {
  const auto message = [](const std::string& settings) {
    const auto read = with_settings(settings);
    return read ? "" : read.error().message;
  };
  EXPECT_EQ(message(R"({"streams":2})"),
            "FILE:1: field `settings.streams`: found an unknown setting; expected a known setting");
  EXPECT_EQ(message(R"({"connector":7})"),
            "FILE:1: field `settings.connector`: found 7; expected up to 4 digits: 1 (peers), 2 "
            "(host) or 3 (one-group-peers)");
  EXPECT_EQ(
      message(R"({"connector":22222})"),
      "FILE:1: field `settings.connector`: found 22222; expected up to 4 digits: 1 (peers), 2 "
      "(host) or 3 (one-group-peers)");
  EXPECT_EQ(message(R"({"connector":"nfs"})"),
            "FILE:1: field `settings.connector`: found \"nfs\"; expected peers, host, "
            "one-group-peers or hisparse, or up to 4 of them joined by +");
  EXPECT_EQ(message(R"({"numbers":2})"),
            "FILE:1: field `settings.numbers`: found 2; expected an integer from 0 to 1");
  EXPECT_EQ(message(R"({"draft_acceptance_percent":100000})"),
            "FILE:1: field `settings.draft_acceptance_percent`: found 100000; expected an integer "
            "from 0 to 100");
  EXPECT_EQ(message(R"({"load_failed_percent":101})"),
            "FILE:1: field `settings.load_failed_percent`: found 101; expected an integer from -1 "
            "to 100");
  EXPECT_EQ(message(R"({"x_mine":2})"), "");
}

TEST(RunFields, FormatsSayEverySetting) {
  const std::string document = testing_files::read_whole(
      (std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "docs/formats.md").string());
  for (const RunField& field : run_fields())
    if (field.saved_in != SavedIn::nowhere) {
      EXPECT_NE(document.find("`" + std::string(field.name) + "`"), std::string::npos)
          << field.name << " is not in docs/formats.md";
    }
}

TEST(RunFields, WhatIsGivenOverwritesAndNamesItsFlag) {
  GivenRun given;
  EXPECT_EQ(given.first_said_by(kBySavedCase), "");
  given.set_text("attention_backend", "flashinfer");
  EXPECT_EQ(given.first_said_by(kByRecording), "");
  EXPECT_EQ(given.first_said_by(kBySavedCase), "--attention-backend");
  run_field("enable_prefix_caching").set_number(given.spec, 0);
  given.add(run_field("enable_prefix_caching"));
  EXPECT_EQ(given.first_said_by(kByRecording), "--no-prefix-caching");
  RunSpec run;
  run.num_streams = 3;
  given.apply_to(run);
  EXPECT_EQ(run.attention_backend, AttentionBackend::flashinfer);
  EXPECT_FALSE(run.engine.enable_prefix_caching);
  EXPECT_EQ(run.num_streams, 3);
}

}  // namespace
}  // namespace lockstep
