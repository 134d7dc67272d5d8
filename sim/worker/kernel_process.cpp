#include "sim/worker/kernel_process.h"

#include <fmt/format.h>

#include <span>
#include <utility>
#include <vector>

#include "base/json_writer.h"
#include "sim/worker/shared_bytes.h"
#include "sim/worker/worker_protocol.h"

namespace lockstep {
namespace {

constexpr std::string_view kProtocol = "kernel_protocol";
constexpr std::int64_t kVersion = 1;

// Describes the layers and the memory to map. On a GPU `memory` is empty: each call names its
// memory.
std::string open_message(std::span<const KernelLayer> layers, const std::string& memory) {
  return object_line([&](JsonWriter& out) {
    out.key("open").begin_object().string("memory", memory).key("layers");
    out.each(layers, [&](const KernelLayer& layer) {
      out.begin_object().string("name", layer.name).string("kind", layer.kind);
      out.integer("index", layer.index).integer("group", layer.group);
      out.integer("sliding_window", layer.sliding_window);
      out.integer("attention_chunk_size", layer.attention_chunk_size);
      out.string("dtype", layer.dtype).string("kv_quant_mode", layer.kv_quant_mode);
      out.integer("num_kv_heads", layer.num_kv_heads).integer("head_size", layer.head_size);
      out.end_object();
    });
    out.end_object();
  });
}

// Tensors are sent as offsets from the start of the memory, since the other process maps it
// elsewhere.
std::string call_message(const KernelCall& call) {
  return object_line([&](JsonWriter& out) {
    out.string("run", call.function).integer("layer", call.layer);
    if (!call.memory_handle.empty()) out.string("memory", call.memory_handle);
    out.integer("group", call.group).key("scale").raw(fmt::format("{}", call.scale));
    out.key("tensors").begin_object();
    for (const KernelTensor& tensor : call.tensors) {
      out.key(tensor.name).begin_object().integer("offset", tensor.address - call.memory);
      out.string("dtype", tensor.dtype).key("shape").integers(tensor.shape);
      out.key("strides").integers(tensor.strides).end_object();
    }
    out.end_object().key("integers").begin_object();
    for (const KernelIntegers& list : call.integers) out.key(list.name).integers(list.values);
    out.end_object();
  });
}

class KernelProcess final : public UserKernels {
 public:
  KernelProcess(std::shared_ptr<ForeignEngines> processes, ForeignEngines::Lease process,
                std::unique_ptr<SharedBytes> memory, std::vector<KernelLayer> layers)
      : UserKernels(std::move(layers)),
        processes_(std::move(processes)),
        process_(std::move(process)),
        memory_(std::move(memory)),
        name_((on_gpu() ? "cuda_kernels:" : "kernels:") + processes_->hello().engine.name) {}
  // The device may free GPU memory only after the other process has unmapped it.
  ~KernelProcess() override {  // memory that another process still maps may not be freed
    if (on_gpu()) process_->ask("{\"close\":true}\n", [](JsonObject&) {});
  }

  // Sends the layers. The process may decline single layers, with a reason each, or refuse all.
  Result<void> open() {
    std::string refused;
    process_->ask(open_message(layers_, memory()), [&](JsonObject& reply) {
      if (JsonValue why = reply.optional("refused")) {
        refused = why.nonempty_string();
        return;
      }
      JsonObject opened = reply.required("opened").object();
      JsonArray declined = opened.required("declined").array();
      for (std::size_t i = 0; JsonValue why : declined) decline(i++, why.string());
      opened.finish();
    });
    if (const EngineFailure* failed = process_->failure())
      return fail(fmt::format("--kernels: {}", failed->what));
    return refused.empty() ? Result<void>() : fail(fmt::format("--kernels: {}", refused));
  }

  std::string_view name() const override { return name_; }
  bool has(std::string_view function) const override { return processes_->hello().can(function); }
  bool in_process() const override { return false; }
  std::string memory() const override { return on_gpu() ? "" : memory_->path(); }
  bool on_gpu() const override { return memory_ == nullptr; }
  // A reply with a trace is an exception of the user's code; without one, a result that cannot be
  // used.
  std::optional<KernelFailure> call(const KernelCall& call) override {
    EngineFailure found{.kind = "fault", .what = {}, .trace = {}};
    process_->ask(call_message(call), [&](JsonObject& reply) {
      if (JsonValue what = reply.optional("fault")) found.what = what.nonempty_string();
      if (JsonValue trace = reply.optional("trace")) found.trace = trace.string();
    });
    if (const EngineFailure* const failed = process_->failure()) found = *failed;
    if (found.what.empty()) return std::nullopt;
    if (found.kind == "fault" && !found.trace.empty()) found.kind = "exception";
    if (!found.trace.empty()) found.what += "\n" + found.trace;
    // An exception may follow an illegal access, so a process with a GPU never serves another run.
    if (on_gpu()) process_->fail_reply(found.what);
    return KernelFailure{std::move(found.kind), std::move(found.what)};
  }

 private:
  std::shared_ptr<ForeignEngines> processes_;
  ForeignEngines::Lease process_;
  std::unique_ptr<SharedBytes> memory_;  // null: that of a GPU
  std::string name_;
};

}  // namespace

ForeignEngineOptions kernel_process_options(std::string command) {
  ForeignEngineOptions options{.command = std::move(command),
                               .option = "--kernels",
                               .subject = "the class",
                               .hello = hello_message_of(kProtocol, kVersion)};
  options.read_hello = [](JsonObject& reply) { return read_hello_of(reply, kProtocol, kVersion); };
  // A call may compile a kernel first.
  options.time_limit = std::chrono::seconds(300);
  options.start_limit = std::chrono::seconds(600);  // a busy machine imports for minutes
  return options;
}

Result<std::shared_ptr<UserKernels>> open_user_kernels(std::shared_ptr<ForeignEngines> processes,
                                                       std::vector<KernelLayer> layers,
                                                       bool on_gpu) {
  LS_ASSIGN_OR_RETURN(auto process, processes->take());
  std::unique_ptr<SharedBytes> memory;
  if (!on_gpu) {
    LS_ASSIGN_OR_RETURN(memory, SharedBytes::create());
  }
  auto kernels = std::make_shared<KernelProcess>(std::move(processes), std::move(process),
                                                 std::move(memory), std::move(layers));
  LS_RETURN_IF_ERROR(kernels->open());
  return std::shared_ptr<UserKernels>(std::move(kernels));
}

}  // namespace lockstep
