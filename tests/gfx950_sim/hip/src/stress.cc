// Drives the library from many threads: built together with it under a sanitizer, it must print
// "ok". Argument: a code object file with the kernel "add_one" (pointer, int32).
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "hip_types.h"
#include "sim_control.h"

extern "C" {
int hipSetDevice(int device);
int hipModuleLoadData(hipModule_t* module, const void* image);
int hipModuleUnload(hipModule_t module);
int hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name);
int hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds,
                          hipStream_t stream, void** parameters, void** extra);
int hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags);
int hipStreamDestroy(hipStream_t stream);
int hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode);
int hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph);
int hipGraphInstantiate(hipGraphExec_t* exec, hipGraph_t graph, void*, char*, size_t);
int hipGraphLaunch(hipGraphExec_t exec, hipStream_t stream);
int hipGraphDestroy(hipGraph_t graph);
int hipGraphExecDestroy(hipGraphExec_t exec);
int hipMalloc(void** pointer, size_t bytes);
int hipFree(void* pointer);
}

namespace {

constexpr int kThreads = 16;
constexpr int kRounds = 50;
constexpr int kItems = 64;

std::atomic<int> failures{0};

void Expect(int got, int wanted, const char* what) {
  if (got == wanted) return;
  ++failures;
  std::fprintf(stderr, "%s gave %d, wanted %d: %s\n", what, got, wanted, simhip_last_error_text());
}

// add_one in C++: what the simulator would do.
int Launcher(const SimhipLaunch* launch, char*, size_t, void*) {
  const auto* arguments = static_cast<const char*>(launch->arguments);
  int* data = *reinterpret_cast<int* const*>(arguments);
  const int addend = *reinterpret_cast<const int*>(arguments + 8);
  for (int i = 0; i < kItems; ++i) data[i] += addend;
  return 0;
}

void Work(const std::string& code, int thread) {
  const int device = thread % 8;
  for (int round = 0; round < kRounds; ++round) {
    Expect(hipSetDevice(device), 0, "hipSetDevice");
    hipModule_t module = nullptr;
    hipFunction_t function = nullptr;
    hipStream_t stream = nullptr;
    Expect(hipModuleLoadData(&module, code.data()), 0, "hipModuleLoadData");
    Expect(hipModuleGetFunction(&function, module, "add_one"), 0, "hipModuleGetFunction");
    Expect(hipModuleGetFunction(&function, module, "missing"), hipErrorNotFound, "missing");
    Expect(hipStreamCreateWithFlags(&stream, 1), 0, "hipStreamCreateWithFlags");
    void* pointer = nullptr;
    Expect(hipMalloc(&pointer, kItems * sizeof(int)), 0, "hipMalloc");
    int* data = static_cast<int*>(pointer);
    for (int i = 0; i < kItems; ++i) data[i] = i;
    int addend = round;
    void* parameters[] = {&pointer, &addend};
    Expect(hipModuleLaunchKernel(function, 1, 1, 1, kItems, 1, 1, 0, stream, parameters, nullptr),
           0, "launch");
    Expect(hipStreamBeginCapture(stream, hipStreamCaptureModeThreadLocal), 0, "begin capture");
    Expect(hipModuleLaunchKernel(function, 1, 1, 1, kItems, 1, 1, 0, stream, parameters, nullptr),
           0, "captured launch");
    hipGraph_t graph = nullptr;
    hipGraphExec_t exec = nullptr;
    Expect(hipStreamEndCapture(stream, &graph), 0, "end capture");
    Expect(data[1], 1 + round, "captured launches do not run");
    Expect(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0), 0, "instantiate");
    Expect(hipGraphLaunch(exec, stream), 0, "graph launch");
    Expect(data[kItems - 1], kItems - 1 + 2 * round, "the graph's result");
    Expect(hipSetDevice((device + 1) % 8), 0, "hipSetDevice");
    Expect(hipModuleLaunchKernel(function, 1, 1, 1, kItems, 1, 1, 0, nullptr, parameters, nullptr),
           hipErrorInvalidDeviceFunction, "launch on another device");
    Expect(hipGraphExecDestroy(exec), 0, "hipGraphExecDestroy");
    Expect(hipGraphDestroy(graph), 0, "hipGraphDestroy");
    Expect(hipFree(pointer), 0, "hipFree");
    Expect(hipStreamDestroy(stream), 0, "hipStreamDestroy");
    Expect(hipModuleUnload(module), 0, "hipModuleUnload");
    Expect(hipModuleUnload(module), hipErrorInvalidHandle, "second hipModuleUnload");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::string code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  simhip_set_launcher(Launcher, nullptr);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(Work, code, thread);
  for (std::thread& thread : threads) thread.join();
  for (const char* kind : {"module", "stream", "memory", "graph", "graph_exec"})
    Expect(static_cast<int>(simhip_live(kind)), 0, kind);
  Expect(static_cast<int>(simhip_launch_count()), kThreads * kRounds * 2, "launch count");
  if (failures == 0) std::puts("ok");
  return failures == 0 ? 0 : 1;
}
