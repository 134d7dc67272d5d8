#include "tests/benchmarks/engine_workloads.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/seeded_random.h"

namespace lockstep::cuda {
namespace {

constexpr std::int32_t kBlockSize = 16;

class Builder {
 public:
  Builder(Device& device, const EngineKernels& kernels, const WorkloadSizes& sizes)
      : device_(device), kernels_(kernels), sizes_(sizes), random_(1 << 20) {
    SeededRandom random(1);
    for (std::uint16_t& number : random_)
      number = static_cast<std::uint16_t>(random.below(2) << 15 | (0x3B80 + random.below(0x400)));
  }

  std::vector<Workload> take() {
    LS_CHECK(device_.finish().has_value(), "workloads do not fit the device");
    return std::move(workloads_);
  }

  void cache_writes() {
    write("write_bf16_nhd", pair(DType::bf16, Scaling::none, 0));
    write("write_bf16_hnd", pair(DType::bf16, Scaling::none, 0, true));
    write("write_bf16_x_split", x_split());
    write("write_e4m3_per_tensor", pair(DType::fp8_e4m3, Scaling::per_tensor, 0));
    write("write_int8_per_token_head", pair(DType::int8, Scaling::per_token_head, 16));
    write("write_int4_per_token_head", packed(Scaling::int4_rows));
    write("write_nvfp4", packed(Scaling::fp4_groups));
    write("write_bf16_mla", mla());
    write("write_latent_fp8_rows", latent());
  }

  void attention() {
    attend("attention_decode_bf16", pair(DType::bf16, Scaling::none, 0), 8, 4, false);
    attend("attention_decode_e4m3", pair(DType::fp8_e4m3, Scaling::per_tensor, 0), 8, 4, false);
    attend("attention_decode_mla", mla(), 1, 16, false);
    attend("attention_prefill_bf16", pair(DType::bf16, Scaling::none, 0), 8, 4, true);
  }

  void recurrences() {
    convolve("conv1d_decode", sizes_.decode_requests, 1);
    convolve("conv1d_chunk", 1, sizes_.prefill_tokens);
    mamba("mamba2_decode", sizes_.decode_requests, 1, kernels_.selective_state);
    mamba("mamba2_chunk_in_pieces", 1, sizes_.prefill_tokens, kernels_.selective_chunks);
    delta("delta_rule_decode", sizes_.decode_requests, 1, kernels_.gated_delta);
    delta("delta_rule_chunk_in_pieces", 1, sizes_.prefill_tokens, kernels_.delta_chunks);
  }

  void moves() {
    const std::int64_t page = 64 << 10;
    move("move_states", 1 << 20, sizes_.decode_requests, 4 << 20);
    move("shift_states_in_place", 24 << 10, sizes_.decode_requests, 4096);
    swap("swap_padded_pages", page, page - 512, sizes_.decode_requests * 4);
    read_hot_rows("read_hot_rows", sizes_.context_tokens, sizes_.context_tokens / 4);
  }

 private:
  struct Pair {
    PartLayout key, value;
    std::int64_t page_bytes;
    std::int64_t row_bytes;  // of all parts of a token, scales included
    std::int32_t num_parts = 2;
  };

  template <class T>
  T* zeros(std::int64_t count, const char* name) {
    const std::int64_t size = count * static_cast<std::int64_t>(sizeof(T));
    auto* memory = device_.allocate(size, name);
    device_.zero(memory, size);
    return reinterpret_cast<T*>(memory);
  }
  // Random bf16 numbers of both signs, from 2^-8 to 2, over and over. Read as fp32 they have the
  // same size.
  template <class T>
  T* numbers(std::int64_t count, const char* name) {
    const std::int64_t size = count * static_cast<std::int64_t>(sizeof(T));
    auto* memory = device_.allocate(size, name);
    const std::int64_t piece = static_cast<std::int64_t>(random_.size()) * 2;
    for (std::int64_t at = 0; at < size; at += piece)
      device_.upload(memory + at, random_.data(), std::min(piece, size - at));
    return reinterpret_cast<T*>(memory);
  }
  template <class T>
  T* put(const std::vector<T>& values, const char* name) {
    const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
    auto* memory = device_.allocate(size, name);
    device_.upload(memory, values.data(), size);
    return reinterpret_cast<T*>(memory);
  }
  template <class Params>
  void add(const char* name, std::int64_t bytes, std::int64_t items, Launcher<Params> launcher,
           const Params& params) {
    workloads_.push_back({name, bytes, items, [launcher, params](const LaunchPlace& place) {
                            return launcher(place, params);
                          }});
  }

  // Blocks that a step writes or reads, and the null block.
  std::int32_t num_blocks() const {
    const std::int64_t tokens = std::max<std::int64_t>(
        sizes_.prefill_tokens, std::int64_t{sizes_.decode_requests} * sizes_.context_tokens);
    return static_cast<std::int32_t>(tokens / kBlockSize + 1);
  }
  PartLayout part(DType dtype, Scaling scaling, std::int32_t heads, std::int32_t head_size) {
    PartLayout layout;
    layout.block_size = make_divisor(kBlockSize);
    layout.num_heads = heads;
    layout.head_size = layout.piece_elements = head_size;
    layout.dtype = dtype;
    layout.scaling = scaling;
    if (scaling == Scaling::per_tensor)
      layout.scales = reinterpret_cast<std::byte*>(put(std::vector<float>{1.0f}, "scale"));
    return layout;
  }
  // K and V of 8 heads of 128, one after the other in a page.
  Pair pair(DType dtype, Scaling scaling, std::int64_t scale_bytes, bool hnd = false) {
    Pair made{part(dtype, scaling, 8, 128), {}, 0, 0};
    const std::int64_t row = 128 * itemsize_bytes(dtype) + scale_bytes;
    made.key.token_stride = hnd ? row : 8 * row;
    made.key.head_stride = hnd ? kBlockSize * row : row;
    made.row_bytes = 2 * 8 * row;
    made.page_bytes = made.key.block_stride = made.row_bytes * kBlockSize;
    auto* memory = numbers<std::byte>(made.page_bytes * num_blocks(), "cache");
    made.key.base = memory;
    if (scaling == Scaling::per_token_head) {
      made.key.scales = memory + 128 * itemsize_bytes(dtype);
      made.key.scale_block_stride = made.key.block_stride;
      made.key.scale_token_stride = made.key.token_stride;
      made.key.scale_head_stride = made.key.head_stride;
    }
    made.value = made.key;
    made.value.base += made.page_bytes / 2;
    if (scaling == Scaling::per_token_head) made.value.scales += made.page_bytes / 2;
    return made;
  }
  Pair x_split() {
    Pair made = pair(DType::bf16, Scaling::none, 0);
    made.key.head_stride = made.value.head_stride = 128 * 2 * kBlockSize;
    made.key.token_stride = made.key.piece_elements = 8;
    made.key.token_stride *= 2;
    made.key.piece_stride = 16 * kBlockSize;
    made.value.token_stride = 2;
    made.value.piece_elements = 1;
    made.value.piece_stride = 2 * kBlockSize;
    return made;
  }
  // K and V of 8 heads of 128 in four bits: 64 bytes, and a scale of 4 or 8 of one.
  Pair packed(Scaling scaling) {
    Pair made{part(DType::uint8, scaling, 8, 128), {}, 0, 0};
    const bool groups = scaling == Scaling::fp4_groups;
    const std::int64_t row = 64 + (groups ? 8 : 16);
    made.key.token_stride = made.key.scale_token_stride = 8 * row;
    made.key.head_stride = made.key.scale_head_stride = row;
    made.row_bytes = 2 * 8 * row;
    made.page_bytes = made.key.block_stride = made.row_bytes * kBlockSize;
    made.key.scale_block_stride = made.page_bytes;
    made.key.base = zeros<std::byte>(made.page_bytes * num_blocks(), "cache");
    made.key.scales = made.key.base + 64;
    if (groups) made.key.layer_scale = put(std::vector<float>{0.01f}, "layer scale");
    made.value = made.key;
    made.value.base += made.page_bytes / 2;
    made.value.scales += made.page_bytes / 2;
    return made;
  }
  // DeepSeek V3.2's rows of 656 bytes.
  Pair latent() {
    Pair made{part(DType::uint8, Scaling::latent_fp8_rows, 1, 576), {}, 0, 656, 1};
    made.key.token_stride = made.key.head_stride = made.key.scale_token_stride = 656;
    made.page_bytes = made.key.block_stride = made.key.scale_block_stride = 656 * kBlockSize;
    made.key.base = zeros<std::byte>(made.page_bytes * num_blocks(), "cache");
    made.key.scales = made.key.base + 512;
    made.value = made.key;
    return made;
  }
  Pair mla() {
    Pair made{part(DType::bf16, Scaling::none, 1, 576), {}, 0, 1152, 1};
    made.key.token_stride = made.key.head_stride = 1152;
    made.page_bytes = made.key.block_stride = 1152 * kBlockSize;
    made.key.base = numbers<std::byte>(made.page_bytes * num_blocks(), "cache");
    made.value = made.key;
    made.value.head_size = made.value.piece_elements = 512;
    return made;
  }

  void write(const char* name, const Pair& cache) {
    const std::int32_t tokens = sizes_.prefill_tokens;
    const std::int64_t row =
        std::int64_t{cache.key.num_heads} * cache.key.head_size * 2;  // of the bf16 source
    WritePartsParams params{};
    params.parts[0] = {cache.key, numbers<std::byte>(row * tokens, "key"), row,
                       cache.key.head_size * 2, DType::bf16};
    params.parts[1] = params.parts[0];
    params.parts[1].to = cache.value;
    if (cache.num_parts == 2) params.parts[1].source = numbers<std::byte>(row * tokens, "value");
    std::vector<Slot> slots;  // of whole blocks, anywhere
    for (const std::int64_t block : scattered(num_blocks()))
      for (std::int32_t i = 0; i < kBlockSize && std::ssize(slots) < tokens; ++i)
        slots.push_back(block * kBlockSize + i);
    params.slots = put(slots, "slots");
    params.num_parts = cache.num_parts;
    params.num_rows = tokens;
    add(name, tokens * (row * cache.num_parts + cache.row_bytes + 8), tokens, kernels_.write_parts,
        params);
  }

  void attend(const char* name, const Pair& cache, std::int32_t kv_heads, std::int32_t queries,
              bool prefill) {
    const std::int32_t context = prefill ? sizes_.prefill_tokens / 4 : sizes_.context_tokens;
    const std::int32_t requests = prefill ? 1 : sizes_.decode_requests;
    const std::int32_t per_request = prefill ? context : 1, blocks = context / kBlockSize;
    SplitAttentionParams p{};
    p.key = cache.key;
    p.value = cache.value;
    p.num_tokens = requests * per_request;
    p.num_query_heads = kv_heads * queries;
    p.split_keys = prefill ? context : std::min(context, 512);
    p.num_splits = (context + p.split_keys - 1) / p.split_keys;
    p.scale = 0.1f;
    p.query_dtype = DType::bf16;
    p.causal = true;
    p.table_width = blocks;
    std::vector<std::int32_t> table, rows, positions;
    for (std::int64_t id : scattered(num_blocks() - 1))
      if (static_cast<std::int32_t>(table.size()) < requests * blocks)
        table.push_back(static_cast<std::int32_t>(id) + 1);
    for (std::int32_t i = 0; i < p.num_tokens; ++i) {
      rows.push_back(i / per_request);
      positions.push_back(context - per_request + i % per_request);
    }
    p.block_table = put(table, "block_table");
    p.token_rows = put(rows, "rows");
    p.positions = put(positions, "positions");
    const std::int64_t query_rows = std::int64_t{p.num_tokens} * p.num_query_heads;
    p.queries = numbers<std::byte>(query_rows * p.key.head_size * 2, "queries");
    p.outputs = zeros<float>(query_rows * p.value.head_size, "outputs");
    p.partials = zeros<float>(query_rows * p.num_splits * (2 + p.value.head_size), "partials");
    std::int64_t keys = 0;
    for (std::int32_t position : positions) keys += position + 1;
    add(name, std::int64_t{requests} * context * cache.row_bytes, keys * p.num_query_heads,
        kernels_.split_attention, p);
  }

  void convolve(const char* name, std::int32_t requests, std::int32_t tokens) {
    const std::int32_t channels = sizes_.state_heads * 128, total = requests * tokens;
    ConvParams p{};
    p.page_stride = std::int64_t{channels} * 3 * 2;
    p.channel_stride = 2;
    p.position_stride = channels * 2;
    p.states = numbers<std::byte>(p.page_stride * (requests + 1), "conv states");
    p.input_token_stride = p.output_token_stride = channels * 2;
    p.inputs = numbers<std::byte>(std::int64_t{total} * channels * 2, "inputs");
    p.outputs = zeros<std::byte>(std::int64_t{total} * channels * 2, "outputs");
    p.weights = numbers<float>(channels * 4, "weights");
    std::vector<ConvItem> items;
    for (std::int32_t i = 0; i < requests; ++i)
      items.push_back({i + 1, i + 1, i * tokens, tokens, 0, tokens});
    p.items = put(items, "items");
    p.dtype = DType::bf16;
    p.silu = true;
    p.num_items = requests;
    p.num_channels = channels;
    p.width = 4;
    p.max_tokens = tokens;
    add(name, total * std::int64_t{channels} * 4 + requests * 2 * p.page_stride, total,
        kernels_.causal_conv1d, p);
  }

  struct StateWork {
    RecurrentStates states;
    const RecurrentItem* items;
    const std::int32_t* targets;
    std::int64_t bytes;  // of states, read and written
    std::int32_t tokens;
  };
  StateWork state_work(std::int32_t requests, std::int32_t tokens, std::int32_t rows) {
    StateWork work;
    const std::int64_t page = std::int64_t{sizes_.state_heads} * rows * 128 * 4;
    work.states = {numbers<std::byte>(page * (requests + 1), "ssm states"),
                   page,
                   DType::fp32,
                   sizes_.state_heads,
                   rows,
                   128};
    std::vector<RecurrentItem> items;
    std::vector<std::int32_t> targets(static_cast<std::size_t>(requests * tokens), 0);
    for (std::int32_t i = 0; i < requests; ++i) {
      items.push_back({i + 1, i * tokens, tokens});
      targets[(i + 1) * tokens - 1] = i + 1;
    }
    work.items = put(items, "items");
    work.targets = put(targets, "state_targets");
    work.bytes = 2 * page * requests;
    work.tokens = requests * tokens;
    return work;
  }

  void mamba(const char* name, std::int32_t requests, std::int32_t tokens,
             Launcher<SelectiveStateParams> launcher) {
    const StateWork work = state_work(requests, tokens, 64);
    const std::int64_t heads = sizes_.state_heads, n = work.tokens;
    const SelectiveStateParams p{work.states,
                                 work.items,
                                 work.targets,
                                 numbers<float>(n * heads * 64, "x"),
                                 zeros<float>(n * heads, "dt"),
                                 numbers<float>(n * 128, "B"),
                                 numbers<float>(n * 128, "C"),
                                 numbers<float>(n * heads * 64, "z"),
                                 put(std::vector<float>(heads, -1.0f), "A"),
                                 numbers<float>(heads, "D"),
                                 zeros<float>(heads, "dt_bias"),
                                 zeros<float>(n * heads * 64, "y"),
                                 requests,
                                 1};
    add(name, work.bytes + n * heads * (3 * 64 + 1) * 4, n, launcher, p);
  }

  void delta(const char* name, std::int32_t requests, std::int32_t tokens,
             Launcher<GatedDeltaParams> launcher) {
    const StateWork work = state_work(requests, tokens, 128);
    const std::int64_t heads = sizes_.state_heads, n = work.tokens;
    const GatedDeltaParams p{work.states,
                             work.items,
                             work.targets,
                             numbers<float>(n * heads * 128, "q"),
                             numbers<float>(n * heads * 128, "k"),
                             numbers<float>(n * heads * 128, "v"),
                             put(std::vector<float>(n * heads, -0.1f), "g"),
                             put(std::vector<float>(n * heads, 0.5f), "beta"),
                             zeros<float>(n * heads * 128, "o"),
                             0.1f,
                             true,
                             requests,
                             sizes_.state_heads};
    add(name, work.bytes + n * heads * (4 * 128 + 2) * 4, n, launcher, p);
  }

  void move(const char* name, std::int64_t size, std::int32_t count, std::int64_t apart) {
    const std::int64_t each = size + apart;
    auto* memory = numbers<std::byte>(each * count, "states");
    std::vector<ByteMove> moves;
    for (std::int64_t i = 0; i < count; ++i)
      moves.push_back({memory + i * each, memory + i * each + apart, size});
    add(name, 2 * size * count, count, kernels_.move_bytes,
        MoveBytesParams{put(moves, "moves"), count, size});
  }

  void swap(const char* name, std::int64_t page, std::int64_t payload, std::int32_t count) {
    auto* pages = numbers<std::byte>(page * count, "pages");
    auto* packed = zeros<std::byte>(payload * count, "packed");
    std::vector<BlockCopyItem> items;
    for (std::int64_t block : scattered(count))
      items.push_back(
          {0, static_cast<std::int32_t>(block), static_cast<std::int32_t>(items.size())});
    const std::vector<CopyRegion> regions = {{packed, pages, payload, page, payload, 16}};
    add(name, 2 * payload * count, count, device_.kernels().copy_blocks,
        CopyBlocksParams{put(regions, "regions"), put(std::vector<RegionRange>{{0, 1}}, "groups"),
                         put(items, "items"), count, 1, payload});
  }

  // HiSparse: each request reads `chosen` rows of its context in a run. Its region has room for
  // twice as many and holds half of them, from the run before.
  void read_hot_rows(const char* name, std::int32_t context, std::int32_t chosen) {
    const std::int32_t requests = sizes_.decode_requests, blocks = context / kBlockSize;
    const std::int32_t slots = 2 * chosen, steps = 2 * context / chosen;
    const std::int64_t all = std::int64_t{requests} * slots;
    std::vector<std::int32_t> table, positions, order;
    std::vector<HotReadItem> reads;
    for (std::int32_t i = 0; i < requests; ++i) {
      reads.push_back({i, i * chosen, chosen});
      for (std::int32_t at = 0; at < blocks; ++at) table.push_back(i * blocks + at);
      for (std::int32_t at = 0; at < slots; ++at) order.push_back(at);
    }
    for (std::int32_t step = 0; step < steps; ++step)
      for (std::int32_t at = 0; at < requests * chosen; ++at)
        positions.push_back((step * (chosen / 2) + at % chosen) % context);
    HotReadParams p{};
    AwayRows rows;
    rows.num_slots = slots;
    rows.num_positions = context;
    rows.block_size = make_divisor(kBlockSize);
    rows.host_table = put(table, "host table");
    rows.host_width = blocks;
    rows.held = p.held = put(std::vector<std::int32_t>(all, -1), "held");
    rows.places = p.places = put(std::vector<std::int32_t>(requests * context, -1), "places");
    p.order = put(order, "order");
    p.used = zeros<std::int32_t>(all, "used");
    p.swaps = zeros<HotSwap>(std::int64_t{requests} * chosen, "swaps");
    p.reads = put(reads, "reads");
    p.positions = put(positions, "positions");
    p.away = put(std::vector<AwayRows>{rows}, "away");
    p.num_reads = requests;
    const std::int64_t read = std::int64_t{requests} * chosen;
    workloads_.push_back({name, all * 12 + read * 16, read,
                          [p, steps, chosen, run = 0,
                           launch = device_.kernels().hot_reads](const LaunchPlace& place) mutable {
                            HotReadParams now = p;
                            now.positions += run % steps * (p.num_reads * chosen);
                            now.read_number = 1 + run++ * p.num_reads;
                            return launch(place, now);
                          }});
  }

  Device& device_;
  const EngineKernels& kernels_;
  WorkloadSizes sizes_;
  std::vector<std::uint16_t> random_;
  std::vector<Workload> workloads_;
};

}  // namespace

std::vector<std::int64_t> scattered(std::int64_t count) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::uint64_t state = 1;
  for (std::size_t i = numbers.size(); i > 1; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(numbers[i - 1], numbers[(state >> 33) % i]);
  }
  return numbers;
}

std::vector<Workload> write_workloads(Device& device, const EngineKernels& kernels,
                                      std::int32_t num_tokens) {
  Builder builder(device, kernels, {num_tokens, 1, kBlockSize, 1});
  builder.cache_writes();
  return builder.take();
}

std::vector<Workload> engine_workloads(Device& device, const EngineKernels& kernels,
                                       const WorkloadSizes& sizes) {
  Builder builder(device, kernels, sizes);
  builder.cache_writes();
  builder.attention();
  builder.recurrences();
  builder.moves();
  return builder.take();
}

}  // namespace lockstep::cuda
