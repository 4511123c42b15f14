// The launch contract, as jax_sparse_mla/kernel/contract.py states it, and the custom call that
// asks for a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#define JAX_SPARSE_MLA_CONTRACT_VERSION "1"

// The kernel's arguments in their order.
#define JAX_SPARSE_MLA_ARGUMENTS(ARGUMENT) \
  ARGUMENT(q_latent, pointer)              \
  ARGUMENT(q_rope, pointer)                \
  ARGUMENT(kv, pointer)                    \
  ARGUMENT(indices, pointer)               \
  ARGUMENT(row_begin, pointer)             \
  ARGUMENT(row_end, pointer)               \
  ARGUMENT(out, pointer)                   \
  ARGUMENT(lse, pointer)                   \
  ARGUMENT(q_latent_row_stride, i32)       \
  ARGUMENT(q_latent_head_stride, i32)      \
  ARGUMENT(q_rope_row_stride, i32)         \
  ARGUMENT(q_rope_head_stride, i32)        \
  ARGUMENT(scale_log2e, f32)               \
  ARGUMENT(num_rows, i32)                  \
  ARGUMENT(num_heads, i32)                 \
  ARGUMENT(num_splits, i32)                \
  ARGUMENT(kv_rows, i32)                   \
  ARGUMENT(num_indices, i32)               \
  ARGUMENT(flags, i32)

// How a kernel's symbol ends, which says the dtype of `out`.
#define JAX_SPARSE_MLA_BF16_OUT "_whole"
#define JAX_SPARSE_MLA_F32_OUT "_partial"

namespace jax_sparse_mla {

constexpr int32_t kHeadsPerGroup = 16;
constexpr int32_t kLatentDim = 512;
constexpr int32_t kRopeDim = 64;
constexpr int32_t kRecordBytes = 656;
constexpr int32_t kNumXcd = 8;

// Laid out as the kernel argument segment is.
struct KernelArguments {
  using pointer = const void*;
  using i32 = int32_t;
  using f32 = float;
#define MEMBER(name, kind) kind name;
  JAX_SPARSE_MLA_ARGUMENTS(MEMBER)
#undef MEMBER
};

constexpr uint32_t kArgumentBytes = offsetof(KernelArguments, flags) + sizeof(int32_t);

// The custom call's attributes.
struct Attributes {
  std::string_view code;       // the code object
  std::string_view code_hash;  // its SHA-256
  std::string_view symbol;
  std::string_view arch;  // what the caller compiled for, e.g. "gfx950"
  int32_t block_size;
  int32_t lds_bytes;  // what the caller takes the kernel to have
  float softmax_scale;
  int32_t num_splits;
  int32_t flags;
};

// What contract.py has to agree with, in one line.
#define ENTRY(name, kind) " " #name ":" #kind
constexpr char kContract[] =
    JAX_SPARSE_MLA_CONTRACT_VERSION " " JAX_SPARSE_MLA_BF16_OUT ":bf16 " JAX_SPARSE_MLA_F32_OUT
                                    ":f32" JAX_SPARSE_MLA_ARGUMENTS(ENTRY);
#undef ENTRY

}  // namespace jax_sparse_mla
