// The XLA FFI handlers: the custom call's operands and attributes, checked, become one launch.
//
// On ROCm XLA calls Initialize before each execution, outside of graph capture, and there the code
// object is loaded. XLA on the CPU has no such call, so Execute loads what is missing.

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "contract.h"
#include "error.h"
#include "hip.h"
#include "module_cache.h"

namespace ffi = xla::ffi;

namespace jax_sparse_mla {
namespace {

using Buffer = ffi::AnyBuffer;
using ffi::DataType;

constexpr int32_t kQueryDim = kLatentDim + kRopeDim;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
// A dispatch packet counts work-items in 32 bits.
constexpr int64_t kMaxWorkItems = std::numeric_limits<uint32_t>::max();
constexpr int64_t kAny = -1;  // a dimension of any size

Attributes Decode(const ffi::Dictionary& dictionary) {
  auto read = [&](const char* name, auto& value) {
    const auto found = dictionary.get<std::decay_t<decltype(value)>>(name);
    if (found.has_error()) {
      Fail(ErrorCode::kInvalidArgument, "attribute '", name, "'",
           dictionary.contains(name) ? ": " + found.error().message() : " is missing");
    }
    value = *found;
  };
  Attributes call;
  read("code", call.code);
  read("code_hash", call.code_hash);
  read("symbol", call.symbol);
  read("arch", call.arch);
  read("block_size", call.block_size);
  read("lds_bytes", call.lds_bytes);
  read("softmax_scale", call.softmax_scale);
  read("num_splits", call.num_splits);
  read("flags", call.flags);
  Require(dictionary.size() == 9, "expected 9 attributes, got ", dictionary.size());
  Require(call.num_splits >= 1, "attribute 'num_splits' must be at least 1, got ", call.num_splits);
  Require(call.block_size > 0 && call.block_size <= 1024 && call.block_size % 64 == 0,
          "attribute 'block_size' must be a multiple of 64 up to 1024, got ", call.block_size);
  Require((call.flags & ~1) == 0,
          "attribute 'flags' has bits that this build does not know: ", call.flags);
  return call;
}

std::string Text(int64_t dim) { return dim == kAny ? "any" : std::to_string(dim); }
DataType Text(DataType dtype) { return dtype; }

template <typename Values>
std::string List(const Values& values, const char* separator) {
  std::ostringstream list;
  for (const auto& value : values) list << (list.tellp() > 0 ? separator : "") << Text(value);
  return list.str();
}

// The address of a buffer that has one of the dtypes, and the dimensions.
void* Check(const char* name, const Buffer& buffer, std::initializer_list<DataType> dtypes,
            std::initializer_list<int64_t> dims) {
  const DataType dtype = buffer.element_type();
  if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
    Fail(ErrorCode::kInvalidArgument, "'", name, "' must be ", List(dtypes, " or "), ", got ",
         dtype);
  }
  const Buffer::Dimensions got = buffer.dimensions();
  auto fits = [](int64_t size, int64_t wanted) {
    return size >= 0 && size <= kInt32Max && (wanted == kAny || size == wanted);
  };
  if (!std::equal(got.begin(), got.end(), dims.begin(), dims.end(), fits)) {
    Fail(ErrorCode::kInvalidArgument, "'", name, "' must have shape [", List(dims, ", "),
         "], each size at most 2^31 - 1, got [", List(got, ", "), "]");
  }
  // The kernel moves 16 bytes at a time.
  void* data = buffer.untyped_data();
  const bool empty = std::find(got.begin(), got.end(), 0) != got.end();
  Require(empty || (data != nullptr && reinterpret_cast<uintptr_t>(data) % 16 == 0), "'", name,
          "' must be aligned to 16 bytes, its address is ", data);
  return data;
}

// The last dimension of q_latent or q_rope: its own part alone, or a whole query.
int32_t QueryDim(const Buffer& buffer, int32_t own) {
  const Buffer::Dimensions dims = buffer.dimensions();
  return dims.size() == 3 && dims[2] == kQueryDim ? kQueryDim : own;
}

// What the kernel of this name writes to `out`.
DataType OutDtype(std::string_view symbol) {
  const std::string_view ending = symbol.substr(std::min(symbol.rfind('_'), symbol.size()));
  if (ending == JAX_SPARSE_MLA_BF16_OUT) return DataType::BF16;
  if (ending == JAX_SPARSE_MLA_F32_OUT) return DataType::F32;
  Fail(ErrorCode::kInvalidArgument,
       "attribute 'symbol' must end in " JAX_SPARSE_MLA_BF16_OUT " or " JAX_SPARSE_MLA_F32_OUT
       ", got '",
       symbol, "'");
}

// contract.py, num_workgroups.
int64_t NumWorkgroups(int64_t rows, int64_t heads) {
  const int64_t groups = (heads + kHeadsPerGroup - 1) / kHeadsPerGroup;
  if (groups <= 1) return rows * groups;
  return (rows + kNumXcd - 1) / kNumXcd * kNumXcd * groups;
}

// Once the kernel is in the cache, no lock is held while HIP is called, and nothing is allocated.
void Enqueue(int device, hipStream_t stream, const Attributes& call, KernelArguments& arguments) {
  const int64_t workgroups = NumWorkgroups(arguments.num_rows, arguments.num_heads);
  if (workgroups == 0) return;
  Require(workgroups <= kMaxWorkItems / call.block_size, arguments.num_rows, " rows of ",
          arguments.num_heads, " heads need ", workgroups, " workgroups of ", call.block_size,
          " work-items; one launch takes at most 2^32 - 1 work-items: call the op on fewer rows at "
          "a time");
  const Hip& hip = Hip::Get();
  const hipFunction_t function = FindKernel(hip, device, call);
#define ADDRESS(name, kind) &arguments.name,
  void* addresses[] = {JAX_SPARSE_MLA_ARGUMENTS(ADDRESS)};
#undef ADDRESS
  hip.OnDevice(device, [&] {
    hip.Check("hipModuleLaunchKernel",
              hip.hipModuleLaunchKernel(function, workgroups, 1, 1, call.block_size, 1, 1, 0,
                                        stream, addresses, nullptr));
  });
}

Error Initialize(int32_t device, ffi::Dictionary dictionary) {
  const Attributes call = Decode(dictionary);
  FindKernel(Hip::Get(), device, call);
  return Error::Success();
}

Error Execute(int32_t device, Buffer q_latent, Buffer q_rope, Buffer kv, Buffer indices,
              Buffer row_begin, Buffer row_end, ffi::Result<Buffer> out, ffi::Result<Buffer> lse,
              ffi::Dictionary dictionary, hipStream_t stream) {
  const Attributes call = Decode(dictionary);
  const DataType out_dtype = OutDtype(call.symbol);
  Require(out->element_type() == out_dtype, "'out' must be ", out_dtype, " for kernel '",
          call.symbol, "', got ", out->element_type());
  // log2(e) in double: the product is rounded once.
  const double scale_log2e = call.softmax_scale * 1.4426950408889634074;
  Require(std::fabs(scale_log2e) <= std::numeric_limits<float>::max(),
          "attribute 'softmax_scale' must be finite, also times log2(e), got ", call.softmax_scale);

  const int32_t latent_dim = QueryDim(q_latent, kLatentDim);
  const int32_t rope_dim = QueryDim(q_rope, kRopeDim);
  KernelArguments arguments;
  arguments.q_latent = Check("q_latent", q_latent, {DataType::BF16}, {kAny, kAny, latent_dim});
  const int64_t n = q_latent.dimensions()[0];
  const int64_t heads = q_latent.dimensions()[1];
  const int64_t rows = n * call.num_splits;
  Require(heads <= kInt32Max / kQueryDim, "at most ", kInt32Max / kQueryDim, " heads, got ", heads);
  const auto* rope =
      static_cast<const uint16_t*>(Check("q_rope", q_rope, {DataType::BF16}, {n, heads, rope_dim}));
  arguments.q_rope = rope == nullptr ? nullptr : rope + (rope_dim - kRopeDim);
  arguments.kv =
      Check("kv", kv, {DataType::U8, DataType::S8, DataType::F8E4M3FN}, {kAny, kRecordBytes});
  arguments.indices = Check("indices", indices, {DataType::S32}, {kAny});
  arguments.row_begin = Check("row_begin", row_begin, {DataType::S32}, {rows});
  arguments.row_end = Check("row_end", row_end, {DataType::S32}, {rows});
  arguments.out = Check("out", *out, {out_dtype}, {rows, heads, kLatentDim});
  arguments.lse = Check("lse", *lse, {DataType::F32}, {rows, heads});

  arguments.num_rows = static_cast<int32_t>(rows);
  arguments.num_heads = static_cast<int32_t>(heads);
  arguments.num_splits = call.num_splits;
  arguments.q_latent_row_stride = arguments.num_heads * latent_dim;
  arguments.q_latent_head_stride = latent_dim;
  arguments.q_rope_row_stride = arguments.num_heads * rope_dim;
  arguments.q_rope_head_stride = rope_dim;
  arguments.scale_log2e = static_cast<float>(scale_log2e);
  arguments.kv_rows = static_cast<int32_t>(kv.dimensions()[0]);
  arguments.num_indices = static_cast<int32_t>(indices.dimensions()[0]);
  arguments.flags = call.flags;
  Enqueue(device, stream, call, arguments);
  return Error::Success();
}

// XLA on the CPU has no stream.
constexpr auto kExecuteOnHost = [](auto... operands) { return Execute(operands..., nullptr); };

auto BindOperands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Arg<Buffer>()
      .Ret<Buffer>()
      .Ret<Buffer>()
      .Attrs<ffi::Dictionary>();
}

XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, BindOperands().Ctx<ffi::PlatformStream<hipStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteHost, kExecuteOnHost, BindOperands());

// Nothing may be thrown into XLA.
XLA_FFI_Error* CallGuarded(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) noexcept {
  auto make_error = [&](ErrorCode code, const char* message) {
    XLA_FFI_Error_Create_Args args{};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message;
    args.errc = static_cast<XLA_FFI_Error_Code>(code);
    return frame->api->XLA_FFI_Error_Create(&args);
  };
  try {
    return handler(frame);
  } catch (const Error& error) {
    return make_error(*error.errc(), error.message().c_str());
  } catch (const std::bad_alloc&) {
    return make_error(ErrorCode::kInternal, "jax_sparse_mla: out of host memory");
  } catch (...) {
    return make_error(ErrorCode::kInternal, "jax_sparse_mla: unexpected exception");
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT XLA_FFI_Error* jax_sparse_mla_initialize(XLA_FFI_CallFrame* frame) {
  return CallGuarded(kInitialize, frame);
}

EXPORT XLA_FFI_Error* jax_sparse_mla_execute(XLA_FFI_CallFrame* frame) {
  return CallGuarded(kExecute, frame);
}

EXPORT XLA_FFI_Error* jax_sparse_mla_execute_host(XLA_FFI_CallFrame* frame) {
  return CallGuarded(kExecuteHost, frame);
}

// The launch contract this library was built for; shim.py compares it with contract.py.
EXPORT const char* jax_sparse_mla_contract() { return kContract; }

// Why no HIP runtime can be used, or "" if one can; for the doctor. Valid until this thread's next
// call.
EXPORT const char* jax_sparse_mla_hip_error() try {
  Hip::Get();
  return "";
} catch (Error& error) {
  static thread_local Error kept;
  kept = std::move(error);
  return kept.message().c_str();
} catch (...) {
  return "out of host memory";
}

}  // namespace jax_sparse_mla
