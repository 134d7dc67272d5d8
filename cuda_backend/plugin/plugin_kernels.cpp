#include "cuda_backend/plugin/plugin_kernels.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "cuda_backend/plugin/plugin.h"

namespace lockstep {
namespace {

template <class Member>
struct Named {
  std::string_view name;
  Member member;
};
#define NAMED(name) \
  { #name, &lockstep_call::name }
constexpr Named<lockstep_tensor lockstep_call::*> kTensors[] = {
    NAMED(key),
    NAMED(value),
    NAMED(kv_cache),
    NAMED(slot_mapping),
    NAMED(query),
    NAMED(output),
    NAMED(block_table),
    {"scale", &lockstep_call::scale_of_cache},
    NAMED(k_scale_cache),
    NAMED(v_scale_cache),
    NAMED(positions),
    NAMED(batch_indices),
    NAMED(x),
    NAMED(weight),
    NAMED(conv_state),
    NAMED(dt),
    NAMED(A),
    NAMED(B),
    NAMED(C),
    NAMED(D),
    NAMED(dt_bias),
    NAMED(q),
    NAMED(k),
    NAMED(v),
    NAMED(g),
    NAMED(beta),
    NAMED(ssm_state)};
constexpr Named<lockstep_list lockstep_call::*> kLists[] = {
    NAMED(seq_lens),        NAMED(query_start_loc),   NAMED(block_size),
    NAMED(initial_indices), NAMED(has_initial_state), NAMED(cache_indices),
    NAMED(block_ids),       NAMED(sources),           NAMED(targets)};
#undef NAMED
#define NAMED(name) \
  { #name, &lockstep_plugin::name }
constexpr Named<lockstep_function lockstep_plugin::*> kFunctions[] = {
    NAMED(write),      NAMED(write_latent), NAMED(attend),     NAMED(attend_latent),
    NAMED(begin_step), NAMED(map_slots),    NAMED(conv),       NAMED(ssm),
    NAMED(delta),      NAMED(zero_blocks),  NAMED(copy_blocks)};
#undef NAMED

template <class Member, std::size_t kCount>
Member named(const Named<Member> (&all)[kCount], std::string_view name) {
  const auto* found = std::ranges::find(all, name, &Named<Member>::name);
  return found == std::end(all) ? nullptr : found->member;
}

std::atomic<int> num_calls = 0;  // of plugins' functions, now

// Ends the process of a function that calls exit(): its status is not that of a verdict.
void end_without_verdict() {
  if (num_calls == 0) return;
  std::fflush(nullptr);
  std::fputs("lockstep: a function of the plugin ended the process (exit): no verdict\n", stderr);
  ::_exit(EXIT_FAILURE);
}

// Runs a function of the plugin. Returns what it threw; empty: nothing. The interface is plain C,
// but an exception of C++ code behind it must not end the run without a finding.
template <class Function>
std::string thrown_by(const Function& function) {
  [[maybe_unused]] static const int registered = std::atexit(end_without_verdict);
  struct Call {
    Call() { ++num_calls; }
    ~Call() { --num_calls; }
  } call;
  try {
    function();
    return {};
  } catch (const std::exception& error) {
    return fmt::format("it threw {}", error.what());
  } catch (...) {
    return "it threw another type than std::exception";
  }
}

class PluginKernels final : public UserKernels {
 public:
  PluginKernels(std::string path, std::vector<KernelLayer> layers)
      : UserKernels(std::move(layers)), path_(std::move(path)) {}
  ~PluginKernels() override {
    if (self_ != nullptr && plugin_->close != nullptr) plugin_->close(self_);
    if (handle_ != nullptr) dlclose(handle_);
  }

  Result<void> load() {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path_, error))
      return fail(
          "{}: there is no such file; --backend takes auto, cuda, simt, none or the path of a "
          "plugin",
          path_);
    // A name without a slash would be looked for where the system's libraries are.
    handle_ = dlopen(std::filesystem::absolute(path_).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) return fail("{}: cannot be loaded: {}", path_, dlerror());
    using Open = const lockstep_plugin* (*)();
    const auto entry = reinterpret_cast<Open>(dlsym(handle_, "lockstep_plugin_open"));
    if (entry == nullptr)
      return fail("{}: exports no lockstep_plugin_open; see cuda_backend/plugin/plugin.h", path_);
    if (const std::string thrown = thrown_by([&] { plugin_ = entry(); }); !thrown.empty())
      return fail("{}: lockstep_plugin_open: {}", path_, thrown);
    if (plugin_ == nullptr) return fail("{}: lockstep_plugin_open returned null", path_);
    if (plugin_->version != LOCKSTEP_PLUGIN_VERSION)
      return fail(
          "{}: speaks version {} of the plugin interface, this is version {}, in which a plugin is "
          "a write and an attend function on Lockstep's own pages; port it to "
          "cuda_backend/plugin/plugin.h (docs/check_your_kernels.md)",
          path_, plugin_->version, LOCKSTEP_PLUGIN_VERSION);
    if (plugin_->struct_bytes != sizeof(lockstep_plugin))
      return fail(
          "{}: its lockstep_plugin has {} bytes, here it has {}; set struct_bytes to "
          "sizeof(lockstep_plugin)",
          path_, plugin_->struct_bytes, sizeof(lockstep_plugin));
    if (std::ranges::none_of(kFunctions, [&](const auto& one) { return has(one.name); }))
      return fail("{}: the plugin has no function; give it write or attend", path_);
    for (const std::string_view dtype : {"fp32", "bf16", "fp16"})
      if (query_dtype() == dtype) return {};
    return fail("{}: query_dtype '{}' is not bf16, fp16 or fp32", path_, query_dtype());
  }

  Result<void> open() {
    for (const KernelLayer& layer : layers_)
      given_.push_back(
          {.name = layer.name.c_str(),
           .kind = layer.kind.data(),  // a word of a table, with its end
           .index = layer.index,
           .group = layer.group,
           .sliding_window = static_cast<std::int32_t>(layer.sliding_window),
           .attention_chunk_size = static_cast<std::int32_t>(layer.attention_chunk_size),
           .num_kv_heads = static_cast<std::int32_t>(layer.num_kv_heads),
           .head_size = static_cast<std::int32_t>(layer.head_size),
           .kv_quant_mode = layer.kv_quant_mode.c_str()});
    char error[1024] = {};
    std::string thrown;
    if (plugin_->open != nullptr) {
      thrown = thrown_by([&] {
        self_ = plugin_->open(given_.data(), static_cast<std::int32_t>(given_.size()), error,
                              sizeof error);
      });
      if (!thrown.empty()) return fail("{}: open: {}", path_, thrown);
      if (self_ == nullptr)
        return fail("{}: refuses these layers: {}", path_,
                    error[0] != 0 ? error : "(it does not say why)");
    }
    for (std::size_t i = 0; plugin_->declines != nullptr && i < given_.size(); ++i) {
      const char* why = nullptr;
      thrown = thrown_by([&] { why = plugin_->declines(self_, &given_[i]); });
      if (!thrown.empty()) return fail("{}: declines of {}: {}", path_, given_[i].name, thrown);
      if (why != nullptr) decline(i, *why != 0 ? why : "the plugin declines the layer");
    }
    return {};
  }

  std::string_view name() const override { return path_; }
  bool has(std::string_view function) const override {
    if (function.starts_with("query:")) return function.substr(6) == query_dtype();
    const auto member = named(kFunctions, function);
    return member != nullptr && plugin_->*member != nullptr;
  }
  bool on_gpu() const override { return plugin_->on_gpu != 0; }

  std::optional<KernelFailure> call(const KernelCall& call) override {
    lockstep_call given{};
    given.layer = call.layer < 0 ? nullptr : &given_.at(static_cast<std::size_t>(call.layer));
    given.group = call.group;
    given.scale = call.scale;
    given.stream = call.stream;
    std::vector<std::string> dtypes;  // with their ends
    std::vector<lockstep_tensor> pages;
    dtypes.reserve(call.tensors.size());
    for (const KernelTensor& tensor : call.tensors) {
      lockstep_tensor one{.data = const_cast<std::byte*>(tensor.address),
                          .dtype = dtypes.emplace_back(tensor.dtype).c_str(),
                          .num_dims = static_cast<std::int32_t>(tensor.shape.size()),
                          .shape = {},
                          .strides = {}};
      LS_CHECK(tensor.shape.size() <= std::size(one.shape), "{} dimensions", tensor.shape.size());
      std::ranges::copy(tensor.shape, one.shape);
      std::ranges::copy(tensor.strides, one.strides);
      if (const auto member = named(kTensors, tensor.name); member != nullptr)
        given.*member = one;
      else
        pages.push_back(one);
    }
    for (const KernelIntegers& list : call.integers)
      if (const auto member = named(kLists, list.name); member != nullptr)
        given.*member = {list.on_device, list.values.data(),
                         static_cast<std::int32_t>(list.values.size())};
    given.pages = pages.data();
    given.num_pages = static_cast<std::int32_t>(pages.size());
    const auto function = named(kFunctions, call.function);
    LS_CHECK(function != nullptr, "no function {}", call.function);
    int status = 0;
    const char* why = nullptr;
    const std::string thrown = thrown_by([&] {
      status = (plugin_->*function)(self_, &given);
      if (status != 0 && plugin_->error_text != nullptr) why = plugin_->error_text(self_);
    });
    if (!thrown.empty()) return KernelFailure{"exception", thrown};
    if (status == 0) return std::nullopt;
    return KernelFailure{"fault", fmt::format("it returned {}: {}", status,
                                              why != nullptr ? why : "(it does not say why)")};
  }

 private:
  std::string_view query_dtype() const {
    return plugin_->query_dtype == nullptr ? "fp32" : plugin_->query_dtype;
  }

  const std::string path_;
  void* handle_ = nullptr;
  const lockstep_plugin* plugin_ = nullptr;
  void* self_ = nullptr;
  std::vector<lockstep_layer> given_;  // layers_ in C
};

}  // namespace

Result<std::shared_ptr<UserKernels>> open_plugin(const std::string& path,
                                                 std::vector<KernelLayer> layers) {
  auto kernels = std::make_shared<PluginKernels>(path, std::move(layers));
  LS_RETURN_IF_ERROR(kernels->load());
  LS_RETURN_IF_ERROR(kernels->open());
  return std::shared_ptr<UserKernels>(std::move(kernels));
}

Result<std::shared_ptr<UserKernels>> load_plugin(const std::string& path) {
  auto kernels = std::make_shared<PluginKernels>(path, std::vector<KernelLayer>());
  LS_RETURN_IF_ERROR(kernels->load());
  return std::shared_ptr<UserKernels>(std::move(kernels));
}

}  // namespace lockstep
