// Errors of the shim. They are thrown, and caught at one place: where a handler returns to XLA.
#pragma once

#include <sstream>

#include "xla/ffi/api/ffi.h"

namespace jax_sparse_mla {

using xla::ffi::Error;
using xla::ffi::ErrorCode;

// Throws an Error whose message is made of parts.
template <typename... Parts>
[[noreturn]] void Fail(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  message << "jax_sparse_mla: ";
  (message << ... << parts);
  throw Error(code, message.str());
}

// What the caller has to see to.
template <typename... Parts>
void Require(bool holds, const Parts&... parts) {
  if (!holds) Fail(ErrorCode::kInvalidArgument, parts...);
}

}  // namespace jax_sparse_mla
