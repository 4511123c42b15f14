// Names and texts of HIP error codes.
#pragma once

#include "hip_types.h"

namespace simhip {

struct ErrorText {
  int code;
  const char* name;
  const char* text;
};

// The entry of `code`, or that of hipErrorUnknown.
const ErrorText& DescribeError(int code);

}  // namespace simhip
