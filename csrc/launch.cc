#include "launch.h"

#include <cmath>
#include <initializer_list>
#include <iterator>
#include <limits>

namespace jax_sparse_mla {
namespace {

using Buffer = xla::ffi::AnyBuffer;
using xla::ffi::DataType;

constexpr int kContractVersion = 1;
constexpr int64_t kHeadsPerGroup = 16;
constexpr int64_t kNumXcd = 8;
constexpr int64_t kLatentDim = 512;
constexpr int64_t kRopeDim = 64;
constexpr int64_t kQueryDim = kLatentDim + kRopeDim;
constexpr int64_t kRecordBytes = 656;
constexpr int32_t kKnownFlags = 1;
constexpr int32_t kWaveSize = 64;
constexpr int32_t kMaxBlockSize = 1024;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
// A dispatch packet counts work-items in 32 bits.
constexpr int64_t kMaxWorkItems = std::numeric_limits<uint32_t>::max();
constexpr int64_t kAny = -1;

struct Argument {
  const char* name;
  const char* kind;
  size_t offset;
};

#define ARGUMENT(name, kind) {#name, kind, offsetof(KernelArguments, name)}
constexpr Argument kArguments[] = {
    ARGUMENT(q_latent, "pointer"),
    ARGUMENT(q_rope, "pointer"),
    ARGUMENT(kv, "pointer"),
    ARGUMENT(indices, "pointer"),
    ARGUMENT(row_begin, "pointer"),
    ARGUMENT(row_end, "pointer"),
    ARGUMENT(out, "pointer"),
    ARGUMENT(lse, "pointer"),
    ARGUMENT(q_latent_row_stride, "i32"),
    ARGUMENT(q_latent_head_stride, "i32"),
    ARGUMENT(q_rope_row_stride, "i32"),
    ARGUMENT(q_rope_head_stride, "i32"),
    ARGUMENT(scale_log2e, "f32"),
    ARGUMENT(num_rows, "i32"),
    ARGUMENT(num_heads, "i32"),
    ARGUMENT(num_splits, "i32"),
    ARGUMENT(kv_rows, "i32"),
    ARGUMENT(num_indices, "i32"),
    ARGUMENT(flags, "i32"),
};
#undef ARGUMENT

constexpr size_t kNumArguments = std::size(kArguments);
constexpr uint32_t kArgumentBytes = kArguments[kNumArguments - 1].offset + sizeof(int32_t);

// What a buffer must be: its dtypes, and its dimensions, of which kAny takes any size.
struct Expected {
  const char* name;
  std::initializer_list<DataType> dtypes;
  std::initializer_list<int64_t> dims;
};

template <typename Value>
void Print(std::ostream& out, const Value& value) {
  out << value;
}
void Print(std::ostream& out, const int64_t& dim) {
  if (dim == kAny) {
    out << "any";
  } else {
    out << dim;
  }
}

template <typename Values>
std::string List(const Values& values, const char* separator) {
  std::ostringstream out;
  const char* before = "";
  for (const auto& value : values) {
    out << before;
    Print(out, value);
    before = separator;
  }
  return out.str();
}

Error Check(const Buffer& buffer, const Expected& expected) {
  bool known = false;
  for (DataType dtype : expected.dtypes) known |= buffer.element_type() == dtype;
  if (!known) {
    return InvalidArgument("'", expected.name, "' must be ", List(expected.dtypes, " or "),
                           ", got ", buffer.element_type());
  }
  const Buffer::Dimensions dims = buffer.dimensions();
  bool equal = dims.size() == expected.dims.size();
  size_t i = 0;
  for (int64_t dim : expected.dims) {
    if (!equal) break;
    equal = dim == kAny ? dims[i] >= 0 && dims[i] <= kInt32Max : dims[i] == dim;
    ++i;
  }
  if (!equal) {
    return InvalidArgument("'", expected.name, "' must have shape [", List(expected.dims, ", "),
                           "], each size at most 2^31 - 1, got [", List(dims, ", "), "]");
  }
  return Error::Success();
}

// The kernel moves 16 bytes at a time.
Error CheckAddress(const char* name, const Buffer& buffer) {
  for (int64_t dim : buffer.dimensions()) {
    if (dim == 0) return Error::Success();
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  if (address != 0 && address % 16 == 0) return Error::Success();
  return InvalidArgument("'", name, "' must be aligned to 16 bytes, its address is ",
                         buffer.untyped_data());
}

// The last dimension of q_latent or q_rope: its own part alone, or a whole query.
int64_t QueryDim(const Buffer& buffer, int64_t own) {
  const Buffer::Dimensions dims = buffer.dimensions();
  return dims.size() == 3 && dims[2] == kQueryDim ? kQueryDim : own;
}

// contract.py, num_workgroups.
int64_t NumWorkgroups(int64_t rows, int64_t heads) {
  const int64_t groups = (heads + kHeadsPerGroup - 1) / kHeadsPerGroup;
  if (groups <= 1) return rows * groups;
  return (rows + kNumXcd - 1) / kNumXcd * kNumXcd * groups;
}

Error CheckOperands(const Operands& op, int64_t num_splits) {
  const Expected query = {
      "q_latent", {DataType::BF16}, {kAny, kAny, QueryDim(op.q_latent, kLatentDim)}};
  if (Error error = Check(op.q_latent, query); error.failure()) return error;
  const int64_t n = op.q_latent.dimensions()[0];
  const int64_t heads = op.q_latent.dimensions()[1];
  const int64_t rows = n * num_splits;
  if (rows > kInt32Max) {
    return InvalidArgument("at most 2^31 - 1 rows in one launch, got ", n, " queries in ",
                           num_splits, " splits");
  }
  const struct {
    const Buffer& buffer;
    Expected expected;
  } others[] = {
      {op.q_rope, {"q_rope", {DataType::BF16}, {n, heads, QueryDim(op.q_rope, kRopeDim)}}},
      {op.kv, {"kv", {DataType::U8, DataType::S8, DataType::F8E4M3FN}, {kAny, kRecordBytes}}},
      {op.indices, {"indices", {DataType::S32}, {kAny}}},
      {op.row_begin, {"row_begin", {DataType::S32}, {rows}}},
      {op.row_end, {"row_end", {DataType::S32}, {rows}}},
      {op.out, {"out", {DataType::BF16, DataType::F32}, {rows, heads, kLatentDim}}},
      {op.lse, {"lse", {DataType::F32}, {rows, heads}}},
  };
  if (Error error = CheckAddress("q_latent", op.q_latent); error.failure()) return error;
  for (const auto& [buffer, expected] : others) {
    if (Error error = Check(buffer, expected); error.failure()) return error;
    if (Error error = CheckAddress(expected.name, buffer); error.failure()) return error;
  }
  return Error::Success();
}

Error CheckAttributes(const LaunchAttributes& attributes) {
  if (attributes.num_splits < 1) {
    return InvalidArgument("attribute 'num_splits' must be at least 1, got ",
                           attributes.num_splits);
  }
  if (attributes.block_size < kWaveSize || attributes.block_size > kMaxBlockSize ||
      attributes.block_size % kWaveSize != 0) {
    return InvalidArgument("attribute 'block_size' must be a multiple of ", kWaveSize, " up to ",
                           kMaxBlockSize, ", got ", attributes.block_size);
  }
  if (!std::isfinite(attributes.softmax_scale)) {
    return InvalidArgument("attribute 'softmax_scale' must be finite, got ",
                           attributes.softmax_scale);
  }
  if ((attributes.flags & ~kKnownFlags) != 0) {
    return InvalidArgument("attribute 'flags' has bits that this build does not know: ",
                           attributes.flags);
  }
  return Error::Success();
}

}  // namespace

ErrorOr<Launch> PlanLaunch(const Operands& op, const LaunchAttributes& attributes) {
  if (Error error = CheckAttributes(attributes); error.failure()) return Unexpected(error);
  if (Error error = CheckOperands(op, attributes.num_splits); error.failure()) {
    return Unexpected(error);
  }
  const int64_t rows = op.out.dimensions()[0];
  const int64_t heads = op.out.dimensions()[1];
  const int64_t latent_stride = op.q_latent.dimensions()[2];
  const int64_t rope_stride = op.q_rope.dimensions()[2];
  if (heads * kQueryDim > kInt32Max) {
    return Unexpected(InvalidArgument("at most ", kInt32Max / kQueryDim, " heads, got ", heads));
  }
  const int64_t workgroups = NumWorkgroups(rows, heads);
  if (workgroups > kMaxWorkItems / attributes.block_size) {
    return Unexpected(InvalidArgument(rows, " rows of ", heads, " heads need ", workgroups,
                                      " workgroups of ", attributes.block_size,
                                      " work-items; one launch takes at most 2^32 - 1 work-items: ",
                                      "call the op on fewer rows at a time"));
  }
  // log2(e) in double: the product is rounded once.
  const double scale_log2e = attributes.softmax_scale * 1.4426950408889634074;
  if (std::fabs(scale_log2e) > std::numeric_limits<float>::max()) {
    return Unexpected(
        InvalidArgument("attribute 'softmax_scale' is too large: ", attributes.softmax_scale));
  }

  const auto* rope = static_cast<const uint16_t*>(op.q_rope.untyped_data());
  Launch launch;
  launch.workgroups = static_cast<uint32_t>(workgroups);
  launch.block_size = static_cast<uint32_t>(attributes.block_size);
  KernelArguments& arguments = launch.arguments;
  arguments.q_latent = op.q_latent.untyped_data();
  arguments.q_rope = rope == nullptr ? nullptr : rope + (rope_stride - kRopeDim);
  arguments.kv = op.kv.untyped_data();
  arguments.indices = op.indices.untyped_data();
  arguments.row_begin = op.row_begin.untyped_data();
  arguments.row_end = op.row_end.untyped_data();
  arguments.out = op.out.untyped_data();
  arguments.lse = op.lse.untyped_data();
  arguments.q_latent_row_stride = static_cast<int32_t>(heads * latent_stride);
  arguments.q_latent_head_stride = static_cast<int32_t>(latent_stride);
  arguments.q_rope_row_stride = static_cast<int32_t>(heads * rope_stride);
  arguments.q_rope_head_stride = static_cast<int32_t>(rope_stride);
  arguments.scale_log2e = static_cast<float>(scale_log2e);
  arguments.num_rows = static_cast<int32_t>(rows);
  arguments.num_heads = static_cast<int32_t>(heads);
  arguments.num_splits = attributes.num_splits;
  arguments.kv_rows = static_cast<int32_t>(op.kv.dimensions()[0]);
  arguments.num_indices = static_cast<int32_t>(op.indices.dimensions()[0]);
  arguments.flags = attributes.flags;
  return launch;
}

Error Enqueue(const Hip& hip, int device, hipStream_t stream, const Kernel& kernel,
              const LaunchAttributes& attributes, Launch& launch) {
  const KernelResources& resources = kernel.resources;
  if (int64_t{resources.group_segment_bytes} != attributes.lds_bytes) {
    return InvalidArgument("attribute 'lds_bytes' is ", attributes.lds_bytes,
                           " but the kernel has ", resources.group_segment_bytes, " bytes of LDS");
  }
  // The segment's size may be rounded up to its alignment of 8.
  if (resources.kernarg_bytes < kArgumentBytes ||
      resources.kernarg_bytes > sizeof(KernelArguments)) {
    return InvalidArgument("the kernel takes ", resources.kernarg_bytes,
                           " bytes of arguments, launch contract ", kContractVersion, " has ",
                           kArgumentBytes);
  }
  void* arguments[kNumArguments];
  for (size_t i = 0; i < kNumArguments; ++i) {
    arguments[i] = reinterpret_cast<char*>(&launch.arguments) + kArguments[i].offset;
  }
  CurrentDevice current(hip);
  if (Error error = current.Set(device); error.failure()) return error;
  Error launched = hip.ModuleLaunchKernel(hip, kernel.function, launch.workgroups, 1, 1,
                                          launch.block_size, 1, 1, 0, stream, arguments, nullptr);
  Error restored = current.Restore();
  return launched.failure() ? launched : restored;
}

std::string Contract() {
  std::string contract = std::to_string(kContractVersion);
  for (const Argument& argument : kArguments) {
    contract.append(" ").append(argument.name).append(":").append(argument.kind);
  }
  return contract;
}

}  // namespace jax_sparse_mla
