// The XLA FFI handlers: one implementation, bound for ROCm and for the host.
//
// On ROCm XLA calls Initialize before each execution, outside of graph capture, and there the code
// object is loaded. XLA on the CPU has no such call, so Execute loads what is missing.

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "error.h"
#include "hip.h"
#include "launch.h"
#include "module_cache.h"

namespace ffi = xla::ffi;

namespace jax_sparse_mla {
namespace {

struct Attributes {
  KernelSource source;
  LaunchAttributes launch;
};

constexpr int kNumAttributes = 9;

ErrorOr<Attributes> Decode(const ffi::Dictionary& dictionary) {
  Attributes attributes{};
  Error fault = Error::Success();
  auto read = [&](const char* name, auto& value) {
    if (fault.failure()) return;
    auto found = dictionary.get<std::decay_t<decltype(value)>>(name);
    if (found.has_value()) {
      value = *found;
    } else {
      fault = dictionary.contains(name)
                  ? InvalidArgument("attribute '", name, "': ", found.error().message())
                  : InvalidArgument("attribute '", name, "' is missing");
    }
  };
  read("code", attributes.source.code);
  read("code_hash", attributes.source.code_hash);
  read("symbol", attributes.source.symbol);
  read("arch", attributes.source.arch);
  read("block_size", attributes.launch.block_size);
  read("lds_bytes", attributes.launch.lds_bytes);
  read("softmax_scale", attributes.launch.softmax_scale);
  read("num_splits", attributes.launch.num_splits);
  read("flags", attributes.launch.flags);
  if (fault.success() && dictionary.size() != kNumAttributes) {
    fault = InvalidArgument("expected ", kNumAttributes, " attributes, got ", dictionary.size());
  }
  if (fault.failure()) return Unexpected(fault);
  return attributes;
}

Error Initialize(int32_t device, ffi::Dictionary dictionary) {
  ErrorOr<Attributes> attributes = Decode(dictionary);
  if (attributes.has_error()) return attributes.error();
  ErrorOr<const Hip*> hip = Hip::Get();
  if (hip.has_error()) return hip.error();
  ErrorOr<const Kernel*> kernel = FindKernel(**hip, device, attributes->source);
  return kernel.has_error() ? kernel.error() : Error::Success();
}

Error Execute(int32_t device, hipStream_t stream, ffi::AnyBuffer q_latent, ffi::AnyBuffer q_rope,
              ffi::AnyBuffer kv, ffi::AnyBuffer indices, ffi::AnyBuffer row_begin,
              ffi::AnyBuffer row_end, ffi::Result<ffi::AnyBuffer> out,
              ffi::Result<ffi::AnyBuffer> lse, ffi::Dictionary dictionary) {
  ErrorOr<Attributes> attributes = Decode(dictionary);
  if (attributes.has_error()) return attributes.error();
  const Operands operands{q_latent, q_rope, kv, indices, row_begin, row_end, *out, *lse};
  ErrorOr<Launch> launch = PlanLaunch(operands, attributes->launch);
  if (launch.has_error()) return launch.error();
  if (launch->workgroups == 0) return Error::Success();
  ErrorOr<const Hip*> hip = Hip::Get();
  if (hip.has_error()) return hip.error();
  ErrorOr<const Kernel*> kernel = FindKernel(**hip, device, attributes->source);
  if (kernel.has_error()) return kernel.error();
  return Enqueue(**hip, device, stream, **kernel, attributes->launch, *launch);
}

// Stands in for PlatformStream where XLA has no streams.
struct NullStream {};

template <typename Stream>
auto BindExecute() {
  using Buffer = ffi::AnyBuffer;
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<Stream>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Arg<Buffer>()
      .template Ret<Buffer>()
      .template Ret<Buffer>()
      .template Attrs<ffi::Dictionary>();
}

// Nothing may be thrown into XLA: what is left (memory exhausted) becomes an error too.
XLA_FFI_Error* CallGuarded(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) noexcept {
  const char* reason;
  try {
    return handler(frame);
  } catch (const std::bad_alloc&) {
    reason = "jax_sparse_mla: out of host memory";
  } catch (...) {
    reason = "jax_sparse_mla: unexpected exception";
  }
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = reason;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace
}  // namespace jax_sparse_mla

template <>
struct xla::ffi::CtxDecoding<jax_sparse_mla::NullStream> {
  using Type = jax_sparse_mla::hipStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return Type{nullptr};
  }
};

namespace jax_sparse_mla {
namespace {

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindExecute<ffi::PlatformStream<hipStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteHost, Execute, BindExecute<NullStream>());

}  // namespace
}  // namespace jax_sparse_mla

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT XLA_FFI_Error* jax_sparse_mla_initialize(XLA_FFI_CallFrame* frame) {
  return jax_sparse_mla::CallGuarded(jax_sparse_mla::kInitialize, frame);
}

EXPORT XLA_FFI_Error* jax_sparse_mla_execute(XLA_FFI_CallFrame* frame) {
  return jax_sparse_mla::CallGuarded(jax_sparse_mla::kExecute, frame);
}

EXPORT XLA_FFI_Error* jax_sparse_mla_execute_host(XLA_FFI_CallFrame* frame) {
  return jax_sparse_mla::CallGuarded(jax_sparse_mla::kExecuteHost, frame);
}

// The launch contract this library was built for; shim.py compares it with contract.py.
EXPORT const char* jax_sparse_mla_contract() {
  static const std::string& contract = *new std::string(jax_sparse_mla::Contract());
  return contract.c_str();
}

// Why no HIP runtime can be used, or "" if one can; for the doctor. Valid until this thread's next
// call.
EXPORT const char* jax_sparse_mla_hip_error() try {
  static thread_local std::string reason;
  const auto hip = jax_sparse_mla::Hip::Get();
  reason = hip.has_error() ? hip.error().message() : "";
  return reason.c_str();
} catch (...) {
  return "out of host memory";
}
