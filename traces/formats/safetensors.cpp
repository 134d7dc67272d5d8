// Reading and writing of safetensors. Sizes of a file are untrusted: every offset and product is
// bounded before it is used.
#include "traces/formats/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kLengthBytes = 8;
// 2^48 elements of 8 bytes still fit into 63 bits.
constexpr std::int64_t kElementsMax = std::int64_t{1} << 48;

// Bytes per element of the dtypes that hidden states and content ids need.
constexpr std::pair<std::string_view, std::int64_t> kItemBytes[] = {
    {"BF16", 2}, {"F16", 2}, {"F32", 4}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
    {"I8", 1},   {"U8", 1},  {"I32", 4}, {"I64", 8},     {"U64", 8},
};

// Absent: a dtype outside this table.
std::optional<std::int64_t> item_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kItemBytes)
    if (name == dtype) return bytes;
  return std::nullopt;
}

// Absent: a negative size, or more elements than any file has. The division avoids an overflow of
// the product; a size of 0 makes it 0.
std::optional<std::int64_t> num_elements(std::span<const std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || size > kElementsMax) return std::nullopt;
    if (size != 0 && count > kElementsMax / size) return std::nullopt;
    count *= size;
  }
  return count;
}

// Absent: not a list of unsigned integers up to kElementsMax.
std::optional<std::vector<std::int64_t>> integers_of(const Json& json) {
  if (!json.is_array()) return std::nullopt;
  std::vector<std::int64_t> numbers;
  for (const Json& number : json) {
    if (!number.is_number_unsigned() || number.get<std::uint64_t>() > kElementsMax)
      return std::nullopt;
    numbers.push_back(number.get<std::int64_t>());
  }
  return numbers;
}

// Reads the header's entry of one tensor; `data` is the file after the header, to which
// data_offsets are relative.
Result<SafeTensor> read_tensor(const std::string& name, const Json& entry,
                               std::span<const std::uint8_t> data) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry.contains("data_offsets"))
    return fail("tensor {}: expected dtype, shape and data_offsets", name);
  const auto shape = integers_of(entry["shape"]);
  const auto offsets = integers_of(entry["data_offsets"]);
  if (!shape || !offsets || offsets->size() != 2)
    return fail("tensor {}: shape and data_offsets are lists of counts", name);
  SafeTensor tensor{.name = name, .dtype = entry["dtype"].get<std::string>(), .shape = *shape};
  const auto item = item_bytes(tensor.dtype);
  const auto count = num_elements(tensor.shape);
  if (!item || !count) return fail("tensor {}: of {}", name, tensor.dtype);
  const std::int64_t begin = offsets->front(), end = offsets->back();
  if (end - begin != *count * *item)
    return fail("tensor {}: {} bytes for {} elements of {}", name, end - begin, *count,
                tensor.dtype);
  if (end > std::ssize(data))
    return fail("tensor {} ends at byte {} of {}", name, end, data.size());
  tensor.bytes =
      data.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
  return tensor;
}

}  // namespace

std::string_view safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "BF16";
    case DType::fp16:
      return "F16";
    case DType::fp32:
      return "F32";
    case DType::fp8_e4m3:
      return "F8_E4M3";
    case DType::fp8_e5m2:
      return "F8_E5M2";
    case DType::int8:
      return "I8";
    case DType::uint8:
      return "U8";
  }
  LS_CHECK(false, "dtype {}", static_cast<int>(dtype));
}

// Names are arbitrary bytes, so invalid UTF-8 in them is replaced rather than refused: the header
// must be JSON.
std::vector<std::uint8_t> safetensors_file(std::span<const SafeTensor> tensors) {
  Json header = Json::object();
  std::int64_t offset = 0;
  for (const SafeTensor& tensor : tensors) {
    LS_CHECK(!header.contains(tensor.name), "two tensors have the name {}", tensor.name);
    const std::int64_t end = offset + std::ssize(tensor.bytes);
    const auto count = num_elements(tensor.shape);
    LS_CHECK(count && end - offset == *count * item_bytes(tensor.dtype).value_or(-1),
             "{} bytes of tensor {}", tensor.bytes.size(), tensor.name);
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  std::vector<std::uint8_t> file;
  file.reserve(kLengthBytes + text.size() + static_cast<std::size_t>(offset));
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    file.push_back(static_cast<std::uint8_t>(std::uint64_t{text.size()} >> (8 * i)));
  file.insert(file.end(), text.begin(), text.end());
  for (const SafeTensor& tensor : tensors)
    file.insert(file.end(), tensor.bytes.begin(), tensor.bytes.end());
  return file;
}

// The header's order is not that of the bytes, so tensors are sorted by address before the check
// for gaps. An empty tensor sorts before one that starts at the same byte.
Result<std::vector<SafeTensor>> read_safetensors(std::span<const std::uint8_t> file) {
  if (file.size() < kLengthBytes)
    return fail("{} bytes: too short for a safetensors file", file.size());
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::uint64_t{file[i]} << (8 * i);
  const auto behind = file.subspan(kLengthBytes);
  if (length > behind.size())
    return fail("a header of {} bytes, but the file has only {} of them", length, behind.size());
  const auto text = behind.first(static_cast<std::size_t>(length));
  const Json header = Json::parse(text.begin(), text.end(), nullptr, false);
  if (!header.is_object()) return fail("the header is not one JSON object");
  const auto data = behind.subspan(static_cast<std::size_t>(length));
  std::vector<SafeTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    LS_ASSIGN_OR_RETURN(tensors.emplace_back(), read_tensor(name, entry, data));
  }
  std::ranges::stable_sort(tensors, {}, [](const SafeTensor& tensor) {
    return std::pair(tensor.bytes.data(), tensor.bytes.size());
  });
  std::size_t end = 0;
  for (const SafeTensor& tensor : tensors) {
    const auto begin = static_cast<std::size_t>(tensor.bytes.data() - data.data());
    if (begin != end)
      return fail("tensor {} begins at byte {} of the data, not {}", tensor.name, begin, end);
    end = begin + tensor.bytes.size();
  }
  if (end != data.size()) return fail("{} bytes after the last tensor", data.size() - end);
  return tensors;
}

}  // namespace lockstep
