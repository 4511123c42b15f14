// One launch of the sparse MLA kernel: the custom call's operands, checked, as kernel arguments.
//
// jax_sparse_mla/kernel/contract.py states the contract; Contract() says which one this build has.
#ifndef JAX_SPARSE_MLA_LAUNCH_H_
#define JAX_SPARSE_MLA_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"
#include "hip.h"
#include "module_cache.h"

namespace jax_sparse_mla {

// The kernel's arguments in their order and layout.
struct KernelArguments {
  const void* q_latent;
  const void* q_rope;
  const void* kv;
  const void* indices;
  const void* row_begin;
  const void* row_end;
  void* out;
  void* lse;
  int32_t q_latent_row_stride;
  int32_t q_latent_head_stride;
  int32_t q_rope_row_stride;
  int32_t q_rope_head_stride;
  float scale_log2e;
  int32_t num_rows;
  int32_t num_heads;
  int32_t num_splits;
  int32_t kv_rows;
  int32_t num_indices;
  int32_t flags;
};

// The operands and results of the custom call, as XLA hands them over.
struct Operands {
  using Buffer = xla::ffi::AnyBuffer;
  Buffer q_latent;   // [n, H, 512 or 576] bfloat16; the leading 512 are read
  Buffer q_rope;     // [n, H, 64 or 576] bfloat16; the trailing 64 are read
  Buffer kv;         // [rows, 656], one byte an element
  Buffer indices;    // [nnz] int32
  Buffer row_begin;  // [m] int32, m = n * num_splits
  Buffer row_end;    // [m] int32
  Buffer out;        // [m, H, 512] bfloat16 or float32
  Buffer lse;        // [m, H] float32
};

// The custom call's scalar attributes.
struct LaunchAttributes {
  int32_t block_size;
  int32_t lds_bytes;  // of the code object, to check that the two belong together
  float softmax_scale;
  int32_t num_splits;
  int32_t flags;
};

struct Launch {
  KernelArguments arguments;
  uint32_t workgroups;  // 0: there is nothing to compute
  uint32_t block_size;
};

// Checks ranks, shapes, dtypes, sizes and attributes and fills the kernel's arguments.
ErrorOr<Launch> PlanLaunch(const Operands& operands, const LaunchAttributes& attributes);

// Checks that the kernel belongs to the call and enqueues it. No lock is held, nothing allocated.
Error Enqueue(const Hip& hip, int device, hipStream_t stream, const Kernel& kernel,
              const LaunchAttributes& attributes, Launch& launch);

// The contract's version and arguments, "1 q_latent:pointer q_rope:pointer ...".
std::string Contract();

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_LAUNCH_H_
