#include "simulated_hip.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace jax_sparse_mla {
namespace {

SimulatedHip table;

}  // namespace

void SimulatedHip::Open(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(2);
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      std::fprintf(stderr, "%s has no %s\n", path, name);
      std::exit(2);
    }
  };
  find(table.set_launcher, "simhip_set_launcher");
  find(table.fail, "simhip_fail");
  find(table.clear_failures, "simhip_clear_failures");
  find(table.call_count, "simhip_call_count");
  find(table.get_call, "simhip_get_call");
  find(table.clear_calls, "simhip_clear_calls");
  find(table.launch_count, "simhip_launch_count");
  find(table.live, "simhip_live");
  find(table.GetLastError, "hipGetLastError");
  find(table.GetDevice, "hipGetDevice");
  find(table.SetDevice, "hipSetDevice");
  find(table.StreamCreateWithFlags, "hipStreamCreateWithFlags");
  find(table.StreamDestroy, "hipStreamDestroy");
  find(table.StreamBeginCapture, "hipStreamBeginCapture");
  find(table.StreamEndCapture, "hipStreamEndCapture");
  find(table.GraphInstantiate, "hipGraphInstantiate");
  find(table.GraphLaunch, "hipGraphLaunch");
  find(table.GraphDestroy, "hipGraphDestroy");
  find(table.GraphExecDestroy, "hipGraphExecDestroy");
}

const SimulatedHip& SimulatedHip::Get() { return table; }

std::vector<std::string> SimulatedHip::CallNames() const {
  std::vector<std::string> names;
  SimhipCall call;
  for (uint64_t i = 0; get_call(i, &call) == 0; ++i) names.push_back(call.name);
  return names;
}

int SimulatedHip::CurrentDevice() const {
  int device = -1;
  GetDevice(&device);
  return device;
}

Stream::Stream(int device) {
  const int former = table.CurrentDevice();
  table.SetDevice(device);
  table.StreamCreateWithFlags(&stream_, 1);
  table.SetDevice(former);
}

Stream::~Stream() { table.StreamDestroy(stream_); }

}  // namespace jax_sparse_mla
