// Strict reading of JSON: for any bytes, the result is a value or one error message.
#include "base/json_reader.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/json_writer.h"
#include "base/number_text.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

std::string parse_error(std::string_view text, bool cut_off = false) {
  JsonReader json("f");
  return json.parse(text, 7, cut_off) ? "parsed" : json.error().message;
}

// What reading the member "a" of `text` with `read` is refused with.
template <class Read>
std::string refusal_of_a(std::string_view text, Read read) {
  JsonReader json("f");
  EXPECT_TRUE(json.parse(text)) << json.error().message;
  JsonObject object = json.root().object();
  read(object.required("a"));
  object.finish();
  return json.ok() ? "read" : json.error().message;
}

TEST(JsonReader, EveryKindOfValueIsRead) {
  JsonReader json("f");
  ASSERT_TRUE(
      json.parse(R"({"n":null,"t":true,"i":-5,"d":0.25,"s":"\u00e9\n","l":[1,[],2],"o":{}})"));
  JsonObject object = json.root().object();
  EXPECT_TRUE(object.required("n").is_null());
  EXPECT_TRUE(object.required("t").boolean());
  EXPECT_EQ(object.required("i").integer(), -5);
  EXPECT_EQ(object.required("d").scaled_decimal(9), 250'000'000);
  EXPECT_EQ(object.required("s").string(), "\xc3\xa9\n");
  const JsonArray list = object.required("l").array();
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].integer(), 1);
  EXPECT_EQ(list[1].array().size(), 0u);
  EXPECT_EQ(list[2].integer(), 2);
  EXPECT_EQ(object.required("o").object().size(), 0u);
  object.finish();
  EXPECT_TRUE(json.ok()) << json.error().message;
}

TEST(JsonReader, ALongDecimalIsReadToItsLastDigit) {
  JsonReader json("f");
  const std::string text = "[0.25" + std::string(100, '0') + ",0." + std::string(100, '0') + "1]";
  ASSERT_TRUE(json.parse(text));
  const JsonArray list = json.root().array();
  EXPECT_EQ(list[0].scaled_decimal(2), 25);
  EXPECT_TRUE(json.ok()) << json.error().message;
  list[1].scaled_decimal(2);
  EXPECT_FALSE(json.ok()) << "the last digit is lost";
}

TEST(JsonReader, KeysAreFoundInAnyOrder) {
  JsonReader json("f");
  ASSERT_TRUE(json.parse(R"({"a":1,"b":2,"c":3})"));
  JsonObject object = json.root().object();
  EXPECT_EQ(object.required("c").integer(), 3);
  EXPECT_EQ(object.required("a").integer(), 1);
  EXPECT_EQ(object.required("b").integer(), 2);
  EXPECT_FALSE(object.optional("d"));
  object.finish();
  EXPECT_TRUE(json.ok());
}

TEST(JsonReader, IntegersAreExactOverAllBits) {
  JsonReader json("f");
  ASSERT_TRUE(json.parse("[-9223372036854775808,9223372036854775807,18446744073709551615]"));
  const JsonArray list = json.root().array();
  EXPECT_EQ(list[0].integer(), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(list[1].integer(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(list[2].uint64(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_TRUE(json.ok());
  list[2].integer();
  EXPECT_EQ(json.error().message,
            "f:1: field `[2]`: found 18446744073709551615; expected an integer from "
            "-9223372036854775808 to 9223372036854775807");
}

TEST(JsonReader, WhatIsNotAskedForIsRefused) {
  const auto integer = [](JsonValue value) { value.integer<std::int32_t>(0, 9); };
  EXPECT_EQ(refusal_of_a(R"({"a":1})", integer), "read");
  EXPECT_EQ(refusal_of_a(R"({"a":1,"x_note":[{}]})", integer), "read");
  EXPECT_EQ(
      refusal_of_a(R"({"a":1,"b":2})", integer),
      "f:1: field `b`: found an unknown key; expected a known key, or one that starts with x_");
  EXPECT_EQ(refusal_of_a(R"({"b":2})", integer), "f:1: found no key \"a\"; expected it");
  EXPECT_EQ(refusal_of_a(R"({"a":10})", integer),
            "f:1: field `a`: found 10; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":1.0})", integer),
            "f:1: field `a`: found 1.0; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":1e0})", integer),
            "f:1: field `a`: found 1e0; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":99999999999999999999999})", integer),
            "f:1: field `a`: found 99999999999999999999999; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":"1"})", integer),
            "f:1: field `a`: found \"1\"; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":[1]})", integer),
            "f:1: field `a`: found an array of 1 element; expected an integer from 0 to 9");
  EXPECT_EQ(refusal_of_a(R"({"a":null})", [](JsonValue value) { value.boolean(); }),
            "f:1: field `a`: found null; expected true or false");
  EXPECT_EQ(refusal_of_a(R"({"a":true})", [](JsonValue value) { value.string(); }),
            "f:1: field `a`: found true; expected a string");
  EXPECT_EQ(refusal_of_a(R"({"a":""})", [](JsonValue value) { value.nonempty_string(); }),
            "f:1: field `a`: found \"\"; expected a string that is not empty");
  EXPECT_EQ(refusal_of_a(R"({"a":{}})", [](JsonValue value) { value.array(); }),
            "f:1: field `a`: found an object; expected an array");
  EXPECT_EQ(refusal_of_a(R"({"a":[]})", [](JsonValue value) { value.object(); }),
            "f:1: field `a`: found an array of 0 elements; expected an object");
}

TEST(JsonReader, WordsAreThoseOfTheFormat) {
  constexpr JsonWord<int> kWords[] = {{"one", 1}, {"two", 2}};
  EXPECT_EQ(refusal_of_a(R"({"a":"two"})",
                         [&](JsonValue value) { EXPECT_EQ(value.word<int>(kWords), 2); }),
            "read");
  EXPECT_EQ(refusal_of_a(R"({"a":"three"})", [&](JsonValue value) { value.word<int>(kWords); }),
            "f:1: field `a`: found \"three\"; expected one of \"one\", \"two\"");
}

TEST(JsonReader, ThePathAndLineOfAFieldAreNamed) {
  JsonReader json("model.json");
  const std::string text = "{\n \"a\": {\"b\": [1,\n  2,\n  -3\n ]}\n}";
  ASSERT_TRUE(json.parse(text));
  for (JsonValue value : json.root().object().required("a").object().required("b").array()) {
    value.integer(0);
  }
  EXPECT_EQ(json.error().message,
            "model.json:4: field `a.b[2]`: found -3; expected an integer from 0 to "
            "9223372036854775807");
}

TEST(JsonReader, TheFirstErrorStaysAndLaterReadsGiveDefaults) {
  JsonReader json("f");
  ASSERT_TRUE(json.parse(R"({"a":"x","b":"y","c":["z"]})"));
  JsonObject object = json.root().object();
  EXPECT_EQ(object.required("a").integer(), 0);
  EXPECT_EQ(object.required("b").string(), "");
  EXPECT_EQ(object.required("c").array().size(), 0u);
  EXPECT_EQ(object.required("d").object().required("e").integer(), 0);
  object.finish();
  EXPECT_TRUE(json.error().message.starts_with("f:1: field `a`")) << json.error().message;
}

TEST(JsonReader, AKeyTwiceIsRefusedWhereverItIs) {
  EXPECT_EQ(parse_error(R"({"a":1,"b":2,"a":3})"),
            "f:7: found the key \"a\" twice; expected it once");
  EXPECT_EQ(parse_error(R"({"o":[{"k":1,"\u006b":2}]})"),
            "f:7: field `o[0]`: found the key \"k\" twice; expected it once");
  EXPECT_EQ(parse_error(R"({"a":{"k":1},"b":{"k":1}})"), "parsed");
}

TEST(JsonReader, WhatIsNotJsonIsRefusedWithItsColumn) {
  EXPECT_TRUE(parse_error("").starts_with("f:7: column 1: found ")) << parse_error("");
  EXPECT_TRUE(
      parse_error("{\"a\":tru}").starts_with("f:7: column 9: found `{\"a\":tru}`; expected JSON"))
      << parse_error("{\"a\":tru}");
  EXPECT_TRUE(parse_error("{\"a\":1} {").starts_with("f:7: column 9: "))
      << parse_error("{\"a\":1} {");
  EXPECT_TRUE(parse_error("{\n\n\"a\":01}").starts_with("f:9: column 6: "))
      << parse_error("{\n\n\"a\":01}");
  for (const char* text : {"{'a':1}", "{\"a\":1,}", "[1,]", "[NaN]", "[+1]", "[.5]", "[1.]", "// x",
                           "\"\x01\"", "\"\\x41\"", "\"\\ud800\"", "nul", "[1 2]", "{1:2}"}) {
    EXPECT_TRUE(parse_error(text).starts_with("f:7: column ")) << text << ": " << parse_error(text);
  }
}

TEST(JsonReader, BytesThatAreNotUtf8AreRefused) {
  for (const char* text : {"\"\xff\"", "\"\xc3\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"",
                           "\"\xf5\x80\x80\x80\"", "\"\xe2\x82\""}) {
    EXPECT_NE(parse_error(text).find("UTF-8"), std::string::npos) << parse_error(text);
  }
}

TEST(JsonReader, AZeroByteAndAByteOrderMarkAreRefused) {
  EXPECT_EQ(parse_error(std::string_view("{}\0{", 4)),
            "f:7: column 3: found a zero byte; expected JSON text");
  EXPECT_EQ(parse_error("\xef\xbb\xbf{}"),
            "f:7: found a byte-order mark; expected UTF-8 without one");
}

TEST(JsonReader, AFileThatWasCutOffSaysSo) {
  EXPECT_TRUE(parse_error("{\"a\":[1,2", true).ends_with("; the file is cut off here"));
  EXPECT_TRUE(parse_error("{\"a\":\"tex", true).ends_with("; the file is cut off here"))
      << parse_error("{\"a\":\"tex", true);
  EXPECT_FALSE(parse_error("{\"a\":[1,2", false).ends_with("; the file is cut off here"));
}

TEST(JsonReader, NestingIsBoundedAndCheckedBeforeItCosts) {
  const std::string deepest(kJsonDepthMax, '[');
  EXPECT_EQ(parse_error(deepest + std::string(kJsonDepthMax, ']')), "parsed");
  EXPECT_NE(parse_error("[" + deepest).find("nested deeper than 64"), std::string::npos);
  EXPECT_NE(parse_error(std::string(1'000'000, '[')).find("nested deeper than 64"),
            std::string::npos);
}

TEST(JsonReader, ARecordThatIsTooLargeIsRefused) {
  const std::string text = "\"" + std::string(kJsonTextBytesMax, 'x') + "\"";
  EXPECT_EQ(parse_error(text),
            "f:7: found 16777218 bytes; expected at most 16777216 in one record");
}

TEST(JsonReader, NoTruncationOrChangedByteBreaksIt) {
  const std::string text = R"({"step":3,"before":[{"add":"r\u00e90","prompt":[[1,2],[3,4.5e1]]}],)"
                           R"("x":{"y":null,"z":-0.1}})";
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_NE(parse_error(text.substr(0, size)), "parsed") << size;
  }
  int refused = 0;
  for (std::uint64_t round = 0; round < 20'000; ++round) {
    std::string bytes = text;
    for (std::uint64_t i = 0; i <= round % 3; ++i) {
      const std::uint64_t bits = splitmix64(round * 4 + i);
      bytes[bits % bytes.size()] = static_cast<char>(bits >> 56);
    }
    const std::string message = parse_error(bytes);
    refused += message != "parsed";
    for (const char c : message) ASSERT_TRUE(c >= 0x20 && c < 0x7f) << message;
  }
  EXPECT_GT(refused, 10'000);
}

TEST(JsonWriter, WhatIsWrittenIsReadBack) {
  JsonWriter out;
  out.begin_object().string("s", "q\"\\\n\x01\xc3\xa9").integer("i", -7).boolean("b", false);
  out.key("n").null().key("u").uint64(~std::uint64_t{0}).key("l").integers(std::vector{1, 2});
  out.key("bad")
      .string(
          "a\xff"
          "b\xc3")
      .end_object();
  const std::string line = out.take_line();
  EXPECT_EQ(line,
            "{\"s\":\"q\\\"\\\\\\u000a\\u0001\xc3\xa9\",\"i\":-7,\"b\":false,\"n\":null,"
            "\"u\":18446744073709551615,\"l\":[1,2],\"bad\":\"a\\ufffdb\\ufffd\"}\n");
  JsonReader json("f");
  ASSERT_TRUE(json.parse(line)) << json.error().message;
  JsonObject object = json.root().object();
  EXPECT_EQ(object.required("s").string(), "q\"\\\n\x01\xc3\xa9");
  EXPECT_EQ(object.required("u").uint64(), ~std::uint64_t{0});
  EXPECT_EQ(object.required("bad").string(),
            "a\xef\xbf\xbd"
            "b\xef\xbf\xbd");
}

TEST(Decimal, TextBecomesAnExactInteger) {
  EXPECT_EQ(scaled_decimal_of("47.0319600", 9), 47'031'960'000);
  EXPECT_EQ(scaled_decimal_of("0", 9), 0);
  EXPECT_EQ(scaled_decimal_of("-0.5", 1), -5);
  EXPECT_EQ(scaled_decimal_of("1.500", 1), 15);
  EXPECT_EQ(scaled_decimal_of("9223372036.854775807", 9), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(scaled_decimal_of("-9223372036.854775808", 9),
            std::numeric_limits<std::int64_t>::min());
}

TEST(Decimal, WhatWouldBeRoundedOrOverflowIsNoNumber) {
  for (const char* text : {"", "-", ".", "1.", ".5", "1.25", "1e3", "+1", " 1", "1 ", "0x1", "1,0",
                           "922337203685477580.8", "1.0.0", "--1"}) {
    EXPECT_EQ(scaled_decimal_of(text, 1), std::nullopt) << text;
  }
}

TEST(Decimal, TheShortestTextIsTurnedBack) {
  EXPECT_EQ(decimal_text_of(1'000'000'000, 9), "1.0");
  EXPECT_EQ(decimal_text_of(47'031'960'000, 9), "47.03196");
  EXPECT_EQ(decimal_text_of(-5, 3), "-0.005");
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{-1},
        std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(scaled_decimal_of(decimal_text_of(value, 9), 9), value);
  }
}

}  // namespace
}  // namespace lockstep
