// Errors of the shim: XLA FFI errors, built from parts.
#ifndef JAX_SPARSE_MLA_ERROR_H_
#define JAX_SPARSE_MLA_ERROR_H_

#include <sstream>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_sparse_mla {

using xla::ffi::Error;
using xla::ffi::ErrorCode;
using xla::ffi::ErrorOr;
using xla::ffi::Unexpected;

template <typename... Parts>
Error MakeError(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  message << "jax_sparse_mla: ";
  (message << ... << parts);
  return Error(code, message.str());
}

template <typename... Parts>
Error InvalidArgument(const Parts&... parts) {
  return MakeError(ErrorCode::kInvalidArgument, parts...);
}

}  // namespace jax_sparse_mla

#endif  // JAX_SPARSE_MLA_ERROR_H_
