#include "reference/placement/worker_pages.h"

#include <algorithm>
#include <boost/icl/interval_set.hpp>
#include <map>
#include <numeric>
#include <set>

#include "base/check.h"
#include "reference/plan/rank_plan.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

using ByteSet = boost::icl::interval_set<std::int64_t>;
using ByteRange = boost::icl::interval<std::int64_t>;

const CacheBackend& backend_of(const std::vector<PlacementLayer>& layers, const std::string& name) {
  const auto at = std::ranges::find(layers, name, &PlacementLayer::name);
  LS_CHECK(at != layers.end(), "no layer {}", name);
  const CacheBackend* backend = find_cache_backend(at->backend);
  LS_CHECK(backend != nullptr, "layer {}: no backend {}", name, at->backend);
  return *backend;
}

// Layers of one group with equal specs and one backend.
struct BackendGroup {
  const CacheBackend* backend = nullptr;
  KVCacheSpec spec;
  std::vector<std::string> layers;
  std::int64_t kernel_block_size = 0;
};

std::vector<BackendGroup> backend_groups(const KVCacheGroupSpec& group,
                                         const std::vector<PlacementLayer>& layers) {
  std::vector<BackendGroup> parts;
  if (!has_layer_views(group.spec.kind)) return parts;
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    const std::string& name = group.layer_names[i];
    const CacheBackend& backend = backend_of(layers, name);
    const KVCacheSpec& spec = group.layer_spec(i);
    auto at = std::ranges::find_if(parts, [&](const BackendGroup& part) {
      return part.backend == &backend && part.spec == spec;
    });
    if (at == parts.end()) at = parts.insert(parts.end(), {&backend, spec, {}, 0});
    at->layers.push_back(name);
  }
  return parts;
}

bool is_interleaved(const Placement& plan, const KVCacheGroupSpec& group) {
  return std::ranges::any_of(plan.tensors, [&](const PlacedTensor& tensor) {
    return tensor.block_stride > tensor.layer_stride &&
           std::ranges::any_of(tensor.layers, [&](const std::string& name) {
             return std::ranges::find(group.layer_names, name) != group.layer_names.end();
           });
  });
}

// The page in the kernel blocks of a backend that wants smaller ones.
Result<CachePage> mapped_page(const LayerPage& layer, const BackendGroup& part,
                              std::int64_t& kernel_block_stride) {
  CachePage page = layer.page;
  const std::int64_t rows = rows_of(part.spec, part.kernel_block_size);
  if (page.rows == rows) return page;
  if (!shares_rows(part.spec.tokens_per_state) || page.heads != 1 || rows == 0 ||
      page.block_stride % (rows * page.row_stride) != 0)
    return fail(
        "layer {}: {} needs kernel blocks of {} tokens, and packed blocks of {} tokens cannot be "
        "split; use --block-size {} or a layout with layers outermost",
        layer.name, part.backend->name, part.kernel_block_size, part.spec.block_size,
        part.kernel_block_size);
  const std::int64_t stride = rows * page.row_stride;
  kernel_block_stride = page.block_stride / stride;
  page.blocks = (page.blocks - 1) * kernel_block_stride + page.rows / rows;
  page.block_stride = stride;
  page.rows = rows;
  return page;
}

// Runs of bytes of one manager block, relative to its start.
struct Run {
  std::int64_t begin = 0, bytes = 0;
};
std::vector<Run> runs_of_block(const CachePage& page, std::int64_t num_blocks) {
  struct Dimension {
    std::int64_t size, stride;
  };
  std::vector<Dimension> dimensions = {{page.blocks / num_blocks, page.block_stride},
                                       {page.heads, page.head_stride},
                                       {page.rows, page.row_stride}};
  std::erase_if(dimensions, [](const Dimension& d) { return d.size == 1; });
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  std::int64_t run = page.content_bytes;
  std::size_t inner = 0;
  while (inner < dimensions.size() && dimensions[inner].stride == run)
    run *= dimensions[inner++].size;
  std::vector<Run> runs = {{0, run}};
  for (; inner < dimensions.size(); ++inner) {
    std::vector<Run> all;
    for (std::int64_t i = 0; i < dimensions[inner].size; ++i)
      for (const Run& r : runs) all.push_back({r.begin + i * dimensions[inner].stride, r.bytes});
    runs = std::move(all);
  }
  return runs;
}

}  // namespace

Result<CachePage> first_page(const PlacedTensor& tensor, CacheLayout order, std::int64_t num_blocks,
                             std::int64_t kernel_block_size) {
  const KVCacheSpec& spec = tensor.spec;
  const std::int64_t ratio = spec.block_size / kernel_block_size;
  if (rows_of(spec, kernel_block_size) == 0)
    return fail(
        "kernel blocks of {} tokens do not hold one KV entry of {} tokens; use a backend with "
        "larger kernel blocks",
        kernel_block_size, text_of(spec.tokens_per_state));
  std::int64_t block_stride = tensor.block_stride;
  if (ratio > 1) {
    if (block_stride != unpadded_page_bytes(spec))
      return fail(
          "blocks of {} tokens are not dense pages (block stride {}, page {} bytes), so they "
          "cannot be split into kernel blocks of {} tokens; use --block-size {} or a layout with "
          "layers outermost",
          spec.block_size, block_stride, unpadded_page_bytes(spec), kernel_block_size,
          kernel_block_size);
    block_stride /= ratio;
  }
  LS_ASSIGN_OR_RETURN(
      const OrderStrides strides,
      order_strides(spec, num_blocks, static_cast<std::int64_t>(tensor.layers.size()), order,
                    kernel_block_size, tensor.layer_stride, block_stride));
  const CachePage page{num_blocks * ratio,  num_heads(spec), rows_of(spec, kernel_block_size),
                       content_bytes(spec), tensor.offset,   strides.block,
                       strides.head,        strides.row};
  const std::int64_t end = page.offset + (page.blocks - 1) * page.block_stride +
                           (page.heads - 1) * page.head_stride + (page.rows - 1) * page.row_stride +
                           page.content_bytes +
                           (std::ssize(tensor.layers) - 1) * tensor.layer_stride;
  if (ratio > 1 && end > tensor.size_bytes)
    return fail(
        "heads of kernel blocks of {} tokens keep the stride of whole blocks: byte {} of an "
        "allocation of {}; use a layout with layers outermost",
        kernel_block_size, end, tensor.size_bytes);
  const std::int64_t item = is_attention(spec.kind) ? itemsize_bytes(spec.dtype) : 1;
  for (const std::int64_t bytes : {page.content_bytes, page.offset, page.block_stride,
                                   page.head_stride, page.row_stride, tensor.layer_stride})
    if (bytes % item != 0)
      return fail("{} bytes are no whole {} elements; rows cannot be viewed", bytes,
                  name_of(spec.dtype));
  return page;
}

TensorView view_of(const CachePage& page, DType dtype) {
  const std::int64_t item = itemsize_bytes(dtype);
  return {dtype,
          {page.blocks, page.heads, page.rows, page.content_bytes / item},
          {page.block_stride / item, page.head_stride / item, page.row_stride / item, 1},
          page.offset / item};
}

std::vector<TensorView> bound_views(const LayerPage& layer) {
  std::vector<TensorView> views;
  if (layer.binding == PageBinding::states) {
    std::int64_t offset = layer.page.offset;
    for (const StateTensorSpec& state : layer.spec.states) {
      views.push_back(state_view(state, layer.page.blocks, offset, layer.page.block_stride));
      offset += size_bytes(state);
    }
    return views;
  }
  TensorView view = view_of(layer.bound, layer.spec.dtype);
  if (layer.binding == PageBinding::rows) {
    view.shape.erase(view.shape.begin() + 1);
    view.stride.erase(view.stride.begin() + 1);
  } else if (layer.binding == PageBinding::rows_then_head) {
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
  } else if (layer.bound == layer.page) {
    return {};
  }
  views.push_back(std::move(view));
  return views;
}

Result<WorkerPages> worker_pages(const Placement& plan, const std::vector<PlacementLayer>& layers,
                                 const PlacementOptions& options) {
  WorkerPages pages;
  pages.num_blocks = plan.num_blocks;
  for (const PlacementLayer& layer : layers) {
    const CacheBackend* backend = find_cache_backend(layer.backend);
    if (options.pcp > 1 && backend != nullptr && !backend->serves_pcp)
      return fail("{} does not serve prefill context parallelism; use pcp 1", backend->name);
  }
  std::vector<std::vector<BackendGroup>> parts;
  for (const KVCacheGroupSpec& group : plan.groups) {
    parts.push_back(backend_groups(group, layers));
    std::int64_t size = group.spec.block_size;
    if (keeps_nothing(group.spec.kind)) continue;
    if (is_attention(group.spec.kind) && !is_interleaved(plan, group)) {
      std::vector<KernelSizes> sizes;
      for (const BackendGroup& part : parts.back())
        sizes.push_back(kernel_sizes(*part.backend, options.device, part.spec));
      LS_ASSIGN_OR_RETURN(size, common_kernel_block(size, sizes));
    }
    for (BackendGroup& part : parts.back()) {
      if (!is_attention(part.spec.kind)) continue;
      LS_ASSIGN_OR_RETURN(
          part.kernel_block_size,
          common_kernel_block(size, {kernel_sizes(*part.backend, options.device, part.spec)}));
    }
    pages.kernel_block_sizes.push_back(size);
  }
  std::map<std::string, std::size_t> place;
  for (const PlacedTensor& tensor : plan.tensors) {
    (tensor.host_resident ? pages.host_bytes : pages.device_bytes) = tensor.size_bytes;
    const auto group = std::ranges::find_if(plan.groups, [&](const KVCacheGroupSpec& g) {
      return std::ranges::find(g.layer_names, tensor.layers[0]) != g.layer_names.end();
    });
    if (group == plan.groups.end())
      return fail("the plan has a tensor for layer {}, which this worker does not have",
                  tensor.layers[0]);
    if (!has_layer_views(tensor.spec.kind)) continue;
    const auto g = static_cast<std::size_t>(group - plan.groups.begin());
    const std::int64_t blocks = tensor.host_resident ? plan.host->num_blocks : plan.num_blocks;
    LS_ASSIGN_OR_RETURN(CachePage page,
                        first_page(tensor, plan.order, blocks, pages.kernel_block_sizes[g]));
    for (const std::string& name : tensor.layers) {
      place[name] = pages.layers.size();
      pages.layers.push_back({name, g, tensor.spec, backend_of(layers, name).binding,
                              tensor.host_resident, page, page});
      page.offset += tensor.layer_stride;
    }
  }
  for (std::size_t g = 0; g < parts.size(); ++g) {
    for (const BackendGroup& part : parts[g]) {
      const bool is_mapped =
          part.kernel_block_size != 0 && part.kernel_block_size != part.spec.block_size;
      std::int64_t stride = 0;
      for (const std::string& name : part.layers) {
        LayerPage& layer = pages.layers[place.at(name)];
        if (is_mapped) {
          LS_ASSIGN_OR_RETURN(layer.bound, mapped_page(layer, part, stride));
        }
        pages.in_backend_order.push_back(place.at(name));
      }
      if (is_mapped)
        pages.kernel_block_groups.push_back({g, part.layers[0], part.kernel_block_size, stride});
    }
  }
  return pages;
}

Result<std::vector<BlockRegion>> zero_segments(const WorkerPages& pages) {
  std::vector<BlockRegion> segments;
  std::map<std::int64_t, std::size_t> seen;
  const auto words = [](std::int64_t bytes) { return bytes % 4 == 0; };
  for (const std::size_t at : pages.in_backend_order) {
    const LayerPage& layer = pages.layers[at];
    if (!is_attention(layer.spec.kind) || layer.host_resident) continue;
    const CachePage& page = layer.page;
    const std::int64_t ratio = page.blocks / pages.num_blocks;
    const std::int64_t outer_heads = page.head_stride > page.block_stride ? page.heads : 1;
    const std::int64_t outer_rows = page.row_stride > page.block_stride ? page.rows : 1;
    const std::int64_t bytes = page.content_bytes +
                               (page.heads / outer_heads - 1) * page.head_stride +
                               (page.rows / outer_rows - 1) * page.row_stride;
    if (!words(page.block_stride) || !words(bytes) || !words(page.offset))
      return fail("layer {}: rows are no whole words of 4 bytes, and zeroing writes words",
                  layer.name);
    for (std::int64_t h = 0; h < outer_heads; ++h)
      for (std::int64_t n = 0; n < outer_rows; ++n)
        for (std::int64_t k = 0; k < ratio; ++k) {
          const std::int64_t address =
              page.offset + h * page.head_stride + n * page.row_stride + k * page.block_stride;
          const BlockRegion segment{address, bytes, page.block_stride * ratio};
          if (!words(address)) return fail("layer {}: byte {} ", layer.name, address);
          const auto [known, is_new] = seen.insert({address, segments.size()});
          if (is_new) {
            segments.push_back(segment);
            continue;
          }
          BlockRegion& widest = segments[known->second];
          if (widest.block_stride != segment.block_stride)
            return fail("layer {}: two strides between blocks at byte {}", layer.name, address);
          widest.bytes = std::max(widest.bytes, bytes);
        }
  }
  return segments;
}

std::vector<LostBytes> lost_in_copies(const WorkerPages& pages, bool by_layer_index) {
  std::vector<std::size_t> order(pages.layers.size());
  std::iota(order.begin(), order.end(), 0);
  if (by_layer_index)
    std::ranges::stable_sort(
        order, {}, [&](std::size_t i) { return layer_number(pages.layers[i].name).value_or(0); });
  // The bytes that a copy into block 2 has to write.
  const auto bytes_of = [&](const CachePage& page) {
    const std::int64_t block =
        page.offset + 2 * page.block_stride * (page.blocks / pages.num_blocks);
    ByteSet bytes;
    for (const Run& run : runs_of_block(page, pages.num_blocks))
      bytes += ByteRange::right_open(block + run.begin, block + run.begin + run.bytes);
    return bytes;
  };
  std::set<std::int64_t> seen;
  ByteSet copied;
  for (const std::size_t i : order) {
    const CachePage& page = pages.layers[i].page;
    if (pages.layers[i].host_resident || !seen.insert(page.offset).second) continue;
    // A block that spans the allocation is copied whole.
    if (page.block_stride * page.blocks == pages.device_bytes) return {};
    copied += bytes_of(page);
  }
  std::vector<LostBytes> lost;
  for (const LayerPage& layer : pages.layers) {
    if (layer.host_resident) continue;
    const ByteSet all = bytes_of(layer.page);
    const std::int64_t of = length(all), bytes = length(all - copied);
    if (bytes == 0) continue;
    const auto known = std::ranges::find_if(
        lost, [&](const LostBytes& other) { return other.bytes == bytes && other.of == of; });
    if (known != lost.end())
      ++known->layers;
    else
      lost.push_back({bytes, of, 1, layer.name});
  }
  return lost;
}

std::vector<OffloadRegion> simple_offload_regions(const Placement& plan) {
  std::vector<OffloadRegion> regions;
  std::set<std::int64_t> seen;
  for (const PlacedTensor& tensor : plan.tensors) {
    if (tensor.host_resident || !has_layer_views(tensor.spec.kind)) continue;
    const std::int64_t blocks_bytes = plan.num_blocks * tensor.block_stride;
    const bool by_layer = tensor.layer_stride >= blocks_bytes;
    const auto num_layers = std::ssize(tensor.layers);
    const std::int64_t begin = by_layer ? tensor.offset : 0;
    const std::int64_t bytes = by_layer ? num_layers * tensor.layer_stride : blocks_bytes;
    LS_CHECK(bytes % blocks_bytes == 0, "{} bytes are no regions of {}", bytes, blocks_bytes);
    for (std::int64_t i = 0; i < bytes / blocks_bytes; ++i) {
      const std::int64_t address = begin + i * blocks_bytes;
      if (!seen.insert(address).second) continue;
      const std::int64_t layer = by_layer ? i * blocks_bytes / tensor.layer_stride : 0;
      regions.push_back({{address, tensor.block_stride, tensor.block_stride},
                         tensor.layers[static_cast<std::size_t>(layer)]});
    }
  }
  return regions;
}

bool is_offloaded(const KVCacheGroupSpec& group) {
  if (is_on_host(group) || !has_layer_views(group.spec.kind)) return false;
  return std::ranges::all_of(specs_of(group), is_cacheable_by_class);
}

std::vector<OffloadRegion> offloading_regions(const Placement& plan, const WorkerPages& pages) {
  std::vector<OffloadRegion> regions;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;  // address and stride
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    if (!is_offloaded(plan.groups[g])) continue;
    for (const std::string& name : plan.groups[g].layer_names) {
      const auto layer = std::ranges::find(pages.layers, name, &LayerPage::name);
      LS_CHECK(layer != pages.layers.end(), "{} has no page", name);
      const std::int64_t bytes = page_bytes(layer->spec);
      const std::int64_t apart = layer->page.block_stride * (layer->page.blocks / pages.num_blocks);
      const std::int64_t stride = is_attention(layer->spec.kind) ? apart : bytes;
      if (stride != bytes) return {{{0, stride, stride}, name}};
      if (seen.insert({layer->page.offset, stride}).second)
        regions.push_back({{layer->page.offset, bytes, stride}, name});
    }
  }
  return regions;
}

}  // namespace lockstep
