// Tensors in a file come back as they were written, and a file of which a part is missing, or that
// says what does not fit, is refused.
#include "traces/formats/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

std::vector<std::uint8_t> sample() {
  static const std::vector<std::uint8_t> rows = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  static const std::vector<std::uint8_t> ids(24, 0x5A);
  const SafeTensor tensors[] = {
      {.name = "layers.0.h", .dtype = "BF16", .shape = {3, 1, 2}, .bytes = rows},
      {.name = "content_ids", .dtype = "U64", .shape = {3}, .bytes = ids},
      {.name = "empty", .dtype = "F32", .shape = {0, 4}}};
  return safetensors_file(tensors);
}

std::vector<std::uint8_t> file_of(std::string_view header, std::size_t data_bytes) {
  std::vector<std::uint8_t> file(8 + header.size() + data_bytes);
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<std::uint8_t>(header.size() >> (8 * i));
  std::ranges::copy(header, file.begin() + 8);
  return file;
}

TEST(Safetensors, WhatWasWrittenIsReadAgainAndTheDataBeginOnEightBytes) {
  const auto file = sample();
  const auto tensors = read_safetensors(file);
  ASSERT_TRUE(tensors) << tensors.error().message;
  ASSERT_EQ(tensors->size(), 3u);
  EXPECT_EQ((*tensors)[0].name, "layers.0.h");
  EXPECT_EQ((*tensors)[0].dtype, "BF16");
  EXPECT_EQ((*tensors)[0].shape, (std::vector<std::int64_t>{3, 1, 2}));
  EXPECT_EQ((*tensors)[0].bytes[11], 12);
  EXPECT_EQ(((*tensors)[0].bytes.data() - file.data()) % 8, 0);
  EXPECT_EQ((*tensors)[1].bytes.size(), 24u);
  EXPECT_EQ(safetensors_file(*tensors), file);
}

TEST(Safetensors, AFileThatEndsEarlyIsRefusedWhereverItEnds) {
  const auto file = sample();
  for (std::size_t size = 0; size < file.size(); ++size)
    EXPECT_FALSE(read_safetensors(std::span(file).first(size))) << size << " bytes";
  auto longer = file;
  longer.push_back(0);
  EXPECT_EQ(read_safetensors(longer).error().message, "1 bytes after the last tensor");
}

TEST(Safetensors, HeadersThatDoNotFitTheirBytesAreRefusedWithTheTensorSName) {
  const auto refusal = [](std::string_view header) {
    const auto read = read_safetensors(file_of(header, 8));
    return read ? std::string("read") : read.error().message;
  };
  EXPECT_EQ(refusal("[]"), "the header is not one JSON object");
  EXPECT_EQ(
      refusal(
          R"({"__metadata__": {}, "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}})"),
      "read");
  const std::pair<std::string_view, std::string_view> refused[] = {
      {R"({"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 8]}})",
       "tensor a: 8 bytes for 7 elements"},
      {R"({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}})", "ends at byte 9"},
      {R"({"a": {"dtype": "U8", "shape": [-8], "data_offsets": [0, 8]}})", "lists of counts"},
      {R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}})", "begins at byte 4"},
      {R"({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}})", "tensor a: of C64"},
      {R"({"a": 3})", "expected dtype"},
      {R"({"a": {"dtype": "U8", "shape": [281474976710656, 281474976710656], )"
       R"("data_offsets": [0, 8]}})",
       "tensor a"}};
  for (const auto& [header, what] : refused)
    EXPECT_NE(refusal(header).find(what), std::string::npos) << header << ": " << refusal(header);
}

}  // namespace
}  // namespace lockstep
