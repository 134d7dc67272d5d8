// Causal convolutions against doubles, and the inputs that they keep, bit by bit: chunks, single
// tokens, speculative tokens of which some are rejected.
#include <algorithm>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/part_oracle.h"

namespace lockstep::cuda {
namespace {

struct ConvShape {
  std::string name;
  DType dtype = DType::bf16;
  int num_channels = 64;
  int width = 4;
  int num_speculative = 0;
  bool channels_last = true;  // a state is [state_len, num_channels]
  bool silu = true;
  bool bias = true;
  int padding_bytes = 0;

  int state_len() const { return width - 1 + num_speculative; }
  int item_bytes() const { return oracle::itemsize(dtype); }
  int page_bytes() const { return state_len() * num_channels * item_bytes() + padding_bytes; }
  std::int64_t at(int block, int position, int channel) const {
    const int index =
        channels_last ? position * num_channels + channel : channel * state_len() + position;
    return std::int64_t{block} * page_bytes() + std::int64_t{index} * item_bytes();
  }
};
std::vector<ConvShape> shapes() {
  return {
      {.name = "bf16 width 4"},
      {.name = "fp32 width 4 channels first padded",
       .dtype = DType::fp32,
       .channels_last = false,
       .padding_bytes = 20},
      {.name = "fp16 width 3 of 3 channels",
       .dtype = DType::fp16,
       .num_channels = 3,
       .width = 3,
       .bias = false},
      {.name = "bf16 width 2 no activation", .width = 2, .silu = false},
      {.name = "bf16 width 4 three drafts", .num_speculative = 3, .padding_bytes = 6},
      {.name = "fp32 width 4 two drafts channels first",
       .dtype = DType::fp32,
       .num_speculative = 2,
       .channels_last = false},
      {.name = "bf16 wide", .num_channels = 1100},
  };
}

constexpr int kBlocks = 9, kTokens = 140;  // more than two segments of the kernel

struct Conv {
  explicit Conv(const ConvShape& of = GENERATE(from_range(shapes()))) : shape(of) {
    for (int i = 0; i < shape.num_channels * shape.width; ++i) weights.push_back(real(41, i));
    for (int i = 0; i < shape.num_channels; ++i) bias.push_back(real(43, i));
    inputs = numbers_of(47, kTokens * shape.num_channels);
    states.assign(std::size_t(kBlocks) * shape.page_bytes(), 0xEE);
    const oracle::Bytes some = numbers_of(53, kBlocks * shape.state_len() * shape.num_channels);
    for (int b = 0, n = 0; b < kBlocks; ++b)
      for (int p = 0; p < shape.state_len(); ++p)
        for (int c = 0; c < shape.num_channels; ++c, ++n)
          std::copy_n(some.begin() + n * shape.item_bytes(), shape.item_bytes(),
                      states.begin() + shape.at(b, p, c));
  }
  static float real(int seed, int i) {
    return static_cast<float>(number(seed, i) % 2000) / 700.0f - 1.4f;
  }
  oracle::Bytes numbers_of(int seed, int count) const {
    oracle::Bytes bytes(std::size_t(count) * shape.item_bytes());
    for (int i = 0; i < count; ++i)
      oracle::put_bits(bytes.data() + i * shape.item_bytes(),
                       oracle::rounded(real(seed, i), shape.dtype), shape.item_bytes());
    return bytes;
  }

  struct Result {
    oracle::Bytes outputs, states;
    bool operator==(const Result&) const = default;
  };
  Result run(KernelDevice& device, const LaunchPlace& place, const std::vector<ConvItem>& items,
             const oracle::Bytes& before) const {
    auto* memory = reinterpret_cast<std::byte*>(device.put(before, "states"));
    ConvParams p{};
    p.states = memory;
    p.page_stride = shape.page_bytes();
    p.channel_stride = shape.at(0, 0, 1);
    p.position_stride = shape.at(0, 1, 0);
    p.inputs = reinterpret_cast<std::byte*>(device.put(inputs, "inputs"));
    p.outputs =
        reinterpret_cast<std::byte*>(device.put(oracle::Bytes(inputs.size(), 0), "outputs"));
    p.input_token_stride = p.output_token_stride = shape.num_channels * shape.item_bytes();
    p.weights = device.put(weights, "weights");
    p.bias = shape.bias ? device.put(bias, "bias") : nullptr;
    p.items = device.put(items, "items");
    p.dtype = shape.dtype;
    p.silu = shape.silu;
    p.num_items = static_cast<std::int32_t>(items.size());
    p.num_channels = shape.num_channels;
    p.width = shape.width;
    p.max_tokens = kTokens;
    CHECK(device.engine().causal_conv1d(place, p) == 0);
    return {device.get(reinterpret_cast<std::uint8_t*>(p.outputs), inputs.size()),
            device.get(reinterpret_cast<std::uint8_t*>(memory), before.size())};
  }

  double input(int token, int channel) const {
    return oracle::element(
        inputs.data() + (token * shape.num_channels + channel) * shape.item_bytes(), shape.dtype);
  }

  // Output of one token of an item in doubles, and how far fp32 and the last rounding may be off.
  struct Exact {
    double value, bound;
  };
  Exact exact(const ConvItem& item, int token, int channel, const oracle::Bytes& before) const {
    double sum = shape.bias ? bias[channel] : 0.0, size = std::fabs(sum);
    for (int k = 0; k < shape.width; ++k) {
      const int at = token - (shape.width - 1) + k;  // the input that weight k meets
      double x = 0;
      if (at >= item.first_token) {
        x = input(at, channel);
      } else if (item.source != 0) {
        const int position = item.offset + (shape.width - 1) - (item.first_token - at);
        x = oracle::element(before.data() + shape.at(item.source, position, channel), shape.dtype);
      }
      sum += weights[channel * shape.width + k] * x;
      size += std::fabs(weights[channel * shape.width + k] * x);
    }
    const double u = std::ldexp(1.0, -24);
    const double value = shape.silu ? sum / (1 + std::exp(-sum)) : sum;
    const double half_ulp = shape.dtype == DType::bf16   ? std::ldexp(1.0, -8)
                            : shape.dtype == DType::fp16 ? std::ldexp(1.0, -11)
                                                         : u;
    const double bound = 1.1 * (shape.width + 1) * u * size + 24 * u * std::fabs(value);
    return {value, bound + half_ulp * (std::fabs(value) + bound) + std::ldexp(1.0, -25)};
  }

  // The states after the items: what item says of (old inputs, tokens), moved byte by byte.
  oracle::Bytes expected_states(const std::vector<ConvItem>& items, oracle::Bytes before) const {
    const oracle::Bytes old = before;
    for (const ConvItem& item : items)
      for (int c = 0; c < shape.num_channels && item.num_tokens > 0 && item.target != 0; ++c) {
        std::vector<oracle::Bytes> sequence;
        for (int i = 0; i < shape.width - 1; ++i) {
          const auto from = old.begin() + shape.at(item.source, item.offset + i, c);
          sequence.push_back(item.source == 0 ? oracle::Bytes(shape.item_bytes(), 0)
                                              : oracle::Bytes(from, from + shape.item_bytes()));
        }
        for (int t = 0; t < item.num_tokens; ++t) {
          const auto from = inputs.begin() +
                            ((item.first_token + t) * shape.num_channels + c) * shape.item_bytes();
          sequence.push_back(oracle::Bytes(from, from + shape.item_bytes()));
        }
        for (std::size_t i = item.keep_from; i < sequence.size(); ++i)
          std::copy(sequence[i].begin(), sequence[i].end(),
                    before.begin() + shape.at(item.target, int(i) - item.keep_from, c));
        for (int i = 0; i < shape.width - 1 && item.checkpoint != 0; ++i) {
          const oracle::Bytes& kept = sequence[item.checkpoint_tokens + i];
          std::copy(kept.begin(), kept.end(), before.begin() + shape.at(item.checkpoint, i, c));
        }
      }
    return before;
  }

  std::vector<ConvItem> items() const {
    std::vector<ConvItem> items = {{0, 1, 0, 9, 0, 9, 7, 5},   // a new prompt, and a checkpoint
                                   {2, 2, 9, 1, 0, 1},         // a decode in place
                                   {3, 4, 10, 2, 0, 2, 8, 1},  // a short chunk, into another block
                                   {5, 0, 12, 4, 0, 4},        // nothing kept
                                   {6, 6, 16, 0, 0, 0}};       // a padded row
    if (shape.num_speculative > 0) {
      const int drafts = shape.num_speculative + 1;
      items.push_back({6, 6, 16, drafts, shape.num_speculative, 1});  // all were accepted before
      items[1] = {2, 2, 9, 1, 1, 1};                                  // one of them was
    }
    return items;
  }

  ConvShape shape;
  std::vector<float> weights, bias;
  oracle::Bytes inputs, states;
};

TEST_CASE_METHOD(Conv,
                 "convolution: outputs are within the bound, states hold the last inputs exactly") {
  DYNAMIC_SECTION(shape.name) {
    const std::vector<ConvItem> work = items();
    const oracle::Bytes after = expected_states(work, states);
    oracle::Bytes outputs;
    in_every_mode([&](CheckMode mode, std::uint64_t seed) {
      KernelDevice device(mode, seed);
      for (const LaunchPlace& place : device.places()) {
        const Result found = run(device, place, work, states);
        CHECK((found.states == after));
        if (outputs.empty()) outputs = found.outputs;
        CHECK((found.outputs == outputs));  // bit for bit in every mode
      }
      device.expect_no_reports();
    });
    for (const ConvItem& item : work)
      for (int t = item.first_token; t < item.first_token + item.num_tokens; ++t)
        for (int c = 0; c < shape.num_channels; ++c) {
          const Exact expected = exact(item, t, c, states);
          const double found = oracle::element(
              outputs.data() + (t * shape.num_channels + c) * shape.item_bytes(), shape.dtype);
          require_near(found, expected.value, expected.bound, "token ", t, " channel ", c);
        }
  }
}

// A prompt of 24 tokens in one chunk, in pieces, token by token, and by drafts of which some are
// rejected and computed again: the same outputs, bit for bit.
TEST_CASE_METHOD(Conv,
                 "convolution: however the tokens are cut, the outputs are those of one chunk") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device(CheckMode::fast);
    const auto whole = run(device, device->place(), {{0, 1, 0, kTokens, 0, kTokens}}, states);
    const auto cut = [&](const std::vector<int>& lengths, bool speculative) {
      oracle::Bytes now = states, outputs(inputs.size(), 0);
      int token = 0, accepted = 1;
      for (std::size_t n = 0; token < kTokens; ++n) {
        const int length = std::min(lengths[n % lengths.size()], kTokens - token);
        ConvItem item{n == 0 ? 0 : 1, 1, token, length, 0, length};
        if (speculative && n > 0) item.offset = accepted - 1;
        if (speculative) item.keep_from = 1;
        const Result found = run(device, device->place(), {item}, now);
        now = found.states;
        accepted = speculative ? 1 + static_cast<int>(number(59, n) % length) : length;
        const int row = shape.num_channels * shape.item_bytes();
        std::copy_n(found.outputs.begin() + token * row, accepted * row,
                    outputs.begin() + token * row);
        token += accepted;
      }
      return outputs;
    };
    CHECK((cut({7, 1, 3}, false) == whole.outputs));
    CHECK((cut({1}, false) == whole.outputs));
    if (shape.num_speculative > 0) {
      CHECK((cut({shape.num_speculative + 1}, true) == whole.outputs));
    }
  }
}

TEST_CASE_METHOD(Conv,
                 "convolution: an ignored offset is seen where more than one draft was accepted",
                 "[executor]") {
  DYNAMIC_SECTION(shape.name) {
    KernelDevice device;
    const Result right = run(device, device->place(), items(), states);
    auto planted = items();
    for (ConvItem& item : planted) item.offset = 0;
    const bool seen = run(device, device->place(), planted, states) != right;
    CHECK(seen == (shape.num_speculative > 0));
  }
}

TEST_CASE_METHOD(Conv, "convolution: states hold under a hundred seeds of preemption", "[slow]") {
  DYNAMIC_SECTION(shape.name) {
    const oracle::Bytes after = expected_states(items(), states);
    in_every_mode(
        [&](CheckMode mode, std::uint64_t seed) {
          KernelDevice device(mode, seed);
          CHECK((run(device, device.places()[1], items(), states).states == after));
          device.expect_no_reports();
        },
        kHuntsOfSlowTests);
  }
}

TEST_CASE("convolution: states beyond 2 and 4 GiB are read and written", "[far]") {
  constexpr std::int64_t kPage = std::int64_t{1} << 30;
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed, 6 * kPage);
    auto* memory = device.room<std::byte>(6 * kPage, "states");
    const std::vector<float> old = {1.0f, 2.0f, 3.0f};
    device->upload(memory + 5 * kPage, old.data(), 12);
    ConvParams p{};
    p.states = memory;
    p.page_stride = kPage;
    p.channel_stride = p.position_stride = 4;
    p.inputs = reinterpret_cast<std::byte*>(device.put(std::vector<float>{4.0f}, "inputs"));
    auto* outputs = device.room<float>(1, "outputs");
    p.outputs = reinterpret_cast<std::byte*>(outputs);
    p.weights = device.put(std::vector<float>{1000.0f, 100.0f, 10.0f, 1.0f}, "weights");
    p.items = device.put(std::vector<ConvItem>{{5, 3, 0, 1, 0, 1}}, "items");
    p.dtype = DType::fp32;
    p.num_items = p.num_channels = p.max_tokens = 1;
    p.width = 4;
    device->launch(device.engine().causal_conv1d, p);
    CHECK(device.get(outputs, 1) == std::vector<float>{1234.0f});
    CHECK(device.get(reinterpret_cast<float*>(memory + 3 * kPage), 3) ==
          std::vector<float>{2.0f, 3.0f, 4.0f});
    device.expect_no_reports();
  });
}

}  // namespace
}  // namespace lockstep::cuda
