// A handler that takes the operands and attributes of the custom call and does nothing: what XLA
// itself costs.

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error DoNothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kEmpty, DoNothing,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* empty_execute(
    XLA_FFI_CallFrame* frame) {
  return kEmpty(frame);
}
