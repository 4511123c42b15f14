// Finds the Python interpreter of this process, if there is one, and has it register the simulator.
//
// The library is not linked against Python: the functions are looked up in the process, so the same
// file serves a C++ driver. XLA calls from threads that do not hold the GIL; PyGILState_Ensure
// takes it. No lock of ours is held here, and two threads that arrive at once both import, which
// Python makes safe, so there is no lock order to break.
#include <dlfcn.h>

#include "runtime.h"

namespace simhip {
namespace {

using PyObject = struct PyObjectOpaque;

struct Python {
  int (*IsInitialized)() = nullptr;
  int (*Ensure)() = nullptr;
  void (*Release)(int) = nullptr;
  PyObject* (*ImportModule)(const char*) = nullptr;
  PyObject* (*CallMethod)(PyObject*, const char*, const char*, ...) = nullptr;
  PyObject* (*GetSysObject)(const char*) = nullptr;
  void (*DecRef)(PyObject*) = nullptr;
  void (*Fetch)(PyObject**, PyObject**, PyObject**) = nullptr;
  PyObject* (*Str)(PyObject*) = nullptr;
  const char* (*AsUtf8)(PyObject*) = nullptr;
  bool complete = true;

  static const Python& Get() {
    static const Python python;
    return python;
  }

 private:
  Python() {
    Find(IsInitialized, "Py_IsInitialized");
    Find(Ensure, "PyGILState_Ensure");
    Find(Release, "PyGILState_Release");
    Find(ImportModule, "PyImport_ImportModule");
    Find(CallMethod, "PyObject_CallMethod");
    Find(GetSysObject, "PySys_GetObject");
    Find(DecRef, "Py_DecRef");
    Find(Fetch, "PyErr_Fetch");
    Find(Str, "PyObject_Str");
    Find(AsUtf8, "PyUnicode_AsUTF8");
  }

  template <typename Fn>
  void Find(Fn& function, const char* name) {
    function = reinterpret_cast<Fn>(dlsym(RTLD_DEFAULT, name));
    complete = complete && function != nullptr;
  }
};

// The text of the pending Python exception, which is cleared.
std::string TakeError(const Python& python) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  python.Fetch(&type, &value, &trace);
  std::string text = "Python exception";
  if (PyObject* str = value != nullptr ? python.Str(value) : nullptr; str != nullptr) {
    if (const char* utf8 = python.AsUtf8(str); utf8 != nullptr) text = utf8;
    python.DecRef(str);
  }
  python.DecRef(type);  // Py_DecRef takes NULL
  python.DecRef(value);
  python.DecRef(trace);
  return text;
}

// Appends the folder of the simulator's package, known since the build, to sys.path.
void ExtendPath(const Python& python) {
  PyObject* path = python.GetSysObject("path");  // borrowed
  PyObject* done =
      path != nullptr ? python.CallMethod(path, "append", "s", GFX950_SIM_PYTHON_FOLDER) : nullptr;
  if (done != nullptr) python.DecRef(done);
}

}  // namespace

bool AttachPython(std::string* text) {
  const Python& python = Python::Get();
  if (!python.complete || python.IsInitialized() == 0) return true;
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&AttachPython), &self);
  const int state = python.Ensure();
  PyObject* module = python.ImportModule("gfx950_sim.hip");
  if (module == nullptr) {
    TakeError(python);
    ExtendPath(python);
    module = python.ImportModule("gfx950_sim.hip");
  }
  PyObject* attached = nullptr;
  if (module != nullptr) {
    attached = python.CallMethod(module, "attach", "s", self.dli_fname);
    python.DecRef(module);
  }
  if (attached == nullptr) {
    *text = "the simulator cannot be attached: " + TakeError(python);
  } else {
    python.DecRef(attached);
  }
  python.Release(state);
  return attached != nullptr;
}

}  // namespace simhip
