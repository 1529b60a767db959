// The task queue. A CUDA stream reaches it through host callbacks, whose argument is a StreamStep.
#include "task_queue.h"

#include <memory>
#include <vector>

#include "bindings/objects.h"

namespace kt {
namespace {

// What a host callback does: it submits a task, or, without a function, waits for the queue.
struct StreamStep {
  std::shared_ptr<TaskQueue> queue;
  QueuedTask task;
  int64_t pending;
  bool once;  // the callback runs once and frees it; otherwise it belongs to the queue's object
};

struct PyTaskQueue {
  std::shared_ptr<TaskQueue> queue = std::make_shared<TaskQueue>();
  std::vector<std::unique_ptr<StreamStep>> kept;

  PyTaskQueue() = default;
  PyTaskQueue(const PyTaskQueue&) = delete;

  void submit(uintptr_t function, uintptr_t argument) const { queue->submit(task_of(function, argument)); }

  void wait(int64_t pending) const {
    if (pending < 0) refuse_value("pending", std::to_string(pending), "0 or more");
    nb::gil_scoped_release released;
    queue->wait(pending);
  }

  uintptr_t step(uintptr_t function, uintptr_t argument, int64_t pending, bool once) {
    if (pending < 0) refuse_value("pending", std::to_string(pending), "0 or more");
    auto made =
        std::make_unique<StreamStep>(StreamStep{queue, {(void (*)(void*))function, (void*)argument}, pending, once});
    StreamStep* address = made.get();
    if (once) {
      made.release();  // the callback frees it
    } else {
      kept.push_back(std::move(made));
    }
    return (uintptr_t)address;
  }

  static QueuedTask task_of(uintptr_t function, uintptr_t argument) {
    if (!function) refuse_value("function", "0", "the address of a C function void(void*)");
    return {(void (*)(void*))function, (void*)argument};
  }
};

// void(void*), for CUDA. An exception of a task is thrown by the next wait from Python.
void step_callback(void* given) {
  auto* step = (StreamStep*)given;
  std::unique_ptr<StreamStep> owned(step->once ? step : nullptr);
  if (step->task.function) return step->queue->submit(step->task);
  try {
    step->queue->wait(step->pending);
  } catch (...) {
    // Rethrown in order: the task that threw is behind us, so this one takes its place in the queue.
    std::exception_ptr thrown = std::current_exception();
    auto* carried = new std::exception_ptr(thrown);
    step->queue->submit({[](void* p) {
                           std::unique_ptr<std::exception_ptr> error((std::exception_ptr*)p);
                           std::rethrow_exception(*error);
                         },
                         carried});
  }
}

}  // namespace

void bind_task_queue(nb::module_& m) {
  using nb::literals::operator""_a;
  nb::class_<PyTaskQueue>(m, "TaskQueue")
      .def(nb::init<>())
      .def("submit", &PyTaskQueue::submit, "function"_a, "argument"_a)
      .def("wait", &PyTaskQueue::wait, "pending"_a = 0)
      .def("step", &PyTaskQueue::step, "function"_a, "argument"_a, "pending"_a = 0, "once"_a = true)
      .def_prop_ro_static("callback", [](nb::handle) { return (uintptr_t)&step_callback; });
}

}  // namespace kt
