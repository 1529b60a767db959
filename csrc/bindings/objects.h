// The classes that Python sees: a pool, the experts of a layer, an adapter for them, a prepared call. Each checks its
// arguments, so that code outside this folder need not, and releases the GIL around long work.
#pragma once

#include <nanobind/stl/string.h>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bindings/tensors.h"
#include "moe/coded_linear.h"
#include "moe/decode_layer.h"
#include "moe/moe.h"

namespace kt {

// The new tokens of a step, copied and checked once for all layers: rows and positions [n], table [n, m], int32.
struct PyStepSequences {
  StepSequences step;
  int32_t last_row = -1, last_block = -1;  // the largest ones

  PyStepSequences(nb::handle rows, nb::handle positions, nb::handle table);
  void check_rows(int64_t rows) const;      // of the batch
  void check_blocks(int64_t blocks) const;  // of a cache
};

struct PyPool {
  std::shared_ptr<Engine> engine;
  std::mutex measuring;

  PyPool(int64_t threads, int64_t groups, int64_t spin_us, bool pin, int64_t yield_us);
  void linear(nb::handle x, nb::list weights, nb::list outs) const;  // out = x weight^T for a few rows
  // out [heads, T, N] = x [heads, T, K] weights [heads, N, K]^T, head by head, for a few rows
  void linear_heads(nb::handle x, nb::handle weights, nb::handle out) const;
  nb::list argmax(nb::handle x) const;  // of each row
  // Rows of query [heads, T, d], key [groups, T, d], value [groups, T, dv] -> rows of out [T, heads, dv]: each
  // sequence's key and value are written to its position, then its query attends to the last `window` keys of its
  // chunk; 0: none. `cache`: (keys [blocks, groups, 64, d], values [blocks, groups, 64, dv]), or in codes of e4m3
  // (keys, values, key scales, value scales) with scales of e8m0 [blocks, groups, 64, 1], all uint8. `sinks`: float32
  // [heads] or None.
  void attend(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle cache,
              const PyStepSequences& sequences, double scale, int64_t window, int64_t chunk, nb::handle sinks) const;
  double rate(const std::string& what, double seconds, int64_t threads, const std::string& isa, int64_t bytes);
  double codes_rate(const std::string& format, int64_t rows, double seconds, int64_t threads, const std::string& isa,
                    bool w8a8);
};

constexpr int kAlignment = 64;  // of memory that holds what the kernels lay out themselves

struct PyExperts;

struct PyAdapter {
  std::shared_ptr<Experts> experts;  // the layer that the adapter belongs to
  std::shared_ptr<Adapter> adapter;
  double gate_scale = 0, up_scale = 0, down_scale = 0;

  PyAdapter(const PyExperts& of, int64_t gate_rank, int64_t up_rank, int64_t down_rank, bool shared);
  void pack(nb::handle gate_a, nb::handle gate_b, nb::handle up_a, nb::handle up_b, nb::handle down_a,
            nb::handle down_b, double gate_scale, double up_scale, double down_scale);
};

// The tensors of a call, kept alive as long as it.
struct BoundArguments {
  std::vector<Array> tensors;
  std::vector<std::shared_ptr<Adapter>> adapters;
  Batch batch;

  Adapters table() const;
  void set_dropout(double dropout, int64_t seed);
  void check_adapters() const;  // throws std::invalid_argument for an id that is not in the table
};

struct PyCall {
  BoundArguments bound;
  std::shared_ptr<const Experts> experts;
  std::exception_ptr error;  // of a callback, which cannot throw to its caller
  std::mutex error_mutex;
  std::optional<Call> call;

  ~PyCall();
  void submit();
  void raise_error();  // of an earlier callback

  // Runs a C callback: an exception is stored and raised by the next submit() or wait() from Python.
  template <class Act>
  void store_error(Act&& act) noexcept {
    try {
      act();
    } catch (...) {
      std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
  }
};

struct PyExperts {
  std::shared_ptr<Experts> experts;
  PyExperts(const PyPool& pool, int64_t num_experts, int64_t hidden, int64_t intermediate, bool gated,
            const std::string& activation, double limit, double alpha, const std::string& isa,
            const std::string& precision, const std::string& gate_format, const std::string& up_format,
            const std::string& down_format);
  // A matrix is a tensor or, where its format is not bf16, the tuple (codes, scales or None, tensor scale or None).
  void pack(int64_t first, nb::handle gate, nb::handle up, nb::handle down, nb::handle gate_bias, nb::handle up_bias,
            nb::handle down_bias);
  void forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
               nb::handle skip, nb::handle keep, nb::handle adapters, double dropout, int64_t seed, bool w8a8,
               bool needs_grad) const;
  // `factors`: for every adapter the tensors of its gradients (gate_a, gate_b, up_a, up_b, down_a, down_b), each a
  // tensor or None; or None.
  void backward(nb::handle grad_out, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle grad_hidden,
                nb::handle grad_weights, nb::handle skip, nb::handle keep, nb::handle adapter, nb::handle adapters,
                nb::handle factors, double dropout, int64_t seed) const;
  // formats.cpp
  void adopt(nb::handle up, nb::handle down, nb::handle up_bias, nb::handle down_bias, nb::handle checksums,
             const std::string& source);
  nb::dict memory() const;  // packed bytes and biases, read-only; views where they are contiguous, else copies
  nb::dict parts() const;   // the packed bytes as they lie: lists of (byte offset in an expert, view [E, bytes])
  nb::dict biases() const;
  void place_pages() const;
  nb::list checksums() const;
  void verify(nb::handle ids) const;
  void decode(const std::string& matrix, int64_t expert, nb::handle out) const;
  PyCall* prepare(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
                  nb::handle skip, nb::handle adapters, bool w8a8) const;

  void transpose(nb::handle source, nb::handle target) const;  // on the thread pool of these experts
 private:
  BoundArguments bind(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle adapter,
                      nb::handle skip, nb::handle adapters, const char* out_name = "out") const;
  void set_w8a8(bool w8a8, BoundArguments& bound) const;
  char* bind_keep(nb::handle keep, BoundArguments& bound, Access access) const;
  LoraTargets bind_targets(nb::handle six, const PyAdapter& adapter, BoundArguments& bound) const;
};

// A linear layer in the bits of a format that is not bf16.
struct PyCodedLinear {
  std::unique_ptr<CodedLinear> linear;
  Format format;

  PyCodedLinear(const PyPool& pool, int64_t rows, int64_t columns, const std::string& format, const std::string& isa);
  void pack(nb::handle matrix);  // (codes, scales or None, tensor scale or None), of one matrix as of one expert
  void forward(nb::handle x, nb::handle out) const;
  void multiply_heads(nb::handle x, nb::handle out, int64_t first, int64_t count, int64_t step, bool along_rows) const;
  void decode(int64_t first, nb::handle out) const;    // rows from `first` on
  void gather(nb::handle rows, nb::handle out) const;  // rows by number
  void adopt(nb::handle blocks);                       // those of memory()
  void set_w8a8(bool on);
  nb::object memory() const;
  uint32_t checksum() const;

 private:
  void check_packed() const;
};

struct CacheShape {
  int64_t groups, key_size, value_size;
};
// `like`: a tensor of the cache's type where it has no codes. The cache's tensors are added to `alive`.
LayerCache cache_of(nb::handle cache, const Array& like, const CacheShape& shape, const PyStepSequences& sequences,
                    std::vector<Array>& alive);
int32_t key_count_of(const char* name, int64_t count);  // of a window or a chunk; 0: there is none
const float* sinks_of(nb::handle sinks, int64_t heads, std::vector<Array>& alive);  // None: null

// One decoder layer for new tokens; decode_layer.cpp.
struct PyDecodeLayer {
  std::unique_ptr<DecodeLayer> layer;
  std::vector<Array> tensors;       // keeps the memory alive
  std::vector<nb::object> objects;  // likewise
  bool attends = false, routes = false;

  PyDecodeLayer(const PyPool& pool, int64_t hidden);
  // Weights are bfloat16 [N, K] or a CodedLinear; norms [d] and biases [N] of the type of the hidden states, biases and
  // norms of heads or None; sinks float32 [heads] or None.
  void set_attention(nb::handle norm, nb::handle query_norm, nb::handle key_norm, nb::list epsilons, nb::list weights,
                     nb::list biases, nb::handle sinks, int64_t head_size, double scale);
  void set_experts(nb::handle norm, double epsilon, nb::handle router, nb::handle bias, const PyExperts& experts,
                   int64_t top_k, bool normalise);
  void attend(nb::handle x, nb::handle out, nb::handle cos, nb::handle sin, nb::handle cache,
              const PyStepSequences& sequences, int64_t window) const;
  void route(nb::handle x, nb::handle out, bool w8a8, bool needs_grad) const;
  static void decode_layers(nb::list layers, nb::handle x, nb::handle out, nb::handle cos, nb::handle sin,
                            nb::list caches, nb::list windows, const PyStepSequences& sequences, nb::list w8a8,
                            bool needs_grad);

 private:
  struct Call;
  struct BoundRotary;
  BoundRotary bind_rotary(nb::handle cos, nb::handle sin, const Call& call) const;
  LayerCache bind_cache(nb::handle cache, const PyStepSequences& sequences, const Call& call,
                        std::vector<Array>& alive) const;
  void check_attends() const;
  void check_routes(bool w8a8) const;
  Call bind(nb::handle x, nb::handle out) const;
  RmsNorm bind_norm(const char* name, nb::handle weight, int64_t size, double epsilon);
  const char* bind_vector(const char* name, nb::handle vector, int64_t size);  // None: null
  DenseWeight bind_weight(const char* name, nb::handle weight, int64_t rows, int64_t columns);
  DType type_ = DType::f32;
  bool typed_ = false;  // a norm has set the type
};

// The packed blocks of some experts as bytes; a copy where they lie in several parts.
nb::object blocks_of(const BlockStore& store, int32_t experts);
Format format_of(const char* name, const std::string& text);
// (entries, levels) of grids.h.
nb::dict describe_format(const std::string& format);
nb::list list_formats();
nb::tuple describe_grid(const std::string& format);
int64_t experts_in(const char* name, nb::handle three, const Format& format);  // in the codes of an encoded matrix
SourceMatrix released_of(const char* name, nb::handle three, const Format& format, int64_t experts, int64_t rows,
                         int64_t columns, std::vector<Array>& alive);

std::string written_formats();  // names of those that are encoded
// Bytes of a row of codes, and the scales of a matrix, as a checkpoint has them. `name`: of the matrix, for errors.
int64_t released_row_bytes(const char* name, const Format& format, int64_t columns);
struct ReleasedScales {
  Element element;
  bool flat;  // [rows], not [rows, spans]
  int64_t rows, spans;
};
// Blocks of GGUF hold their scales, and bf16:12 is packed from numbers without any.
bool has_scale_tensor(const Format& format);
ReleasedScales released_scales(const Format& format, int64_t rows, int64_t columns);

// encode.cpp: source [experts, rows, columns] into codes, scales and tensor scale, on the calling thread. Returns sums
// of squares of what the numbers change by and of the numbers, and whether all of them are finite.
nb::tuple encode(const std::string& format, nb::handle source, nb::handle codes, nb::handle scales, nb::handle tensor,
                 const std::string& isa);
// encode.cpp: source [rows, columns] into codes and scales of rows by kt-kernel's rule (kt_rows.h), on the calling
// thread. Returns whether all numbers are finite.
bool quantise_rows(nb::handle source, int64_t bits, nb::handle codes, nb::handle scales);

// For a destructor, which cannot throw: what a signal handler raised meanwhile is raised at the next instruction.
void raise_later();

// out = x / sqrt(mean(x^2) + epsilon), rounded, times weight; on the calling thread.
void rms_norm(nb::handle x, nb::handle weight, nb::handle out, double epsilon);

// out += scale (x a^T) b for a few rows; on the calling thread.
void add_lora(nb::handle x, nb::handle a, nb::handle b, nb::handle out, double scale);

const KernelTable& table_for(const std::string& isa, Precision precision = Precision::bf16);

void bind_task_queue(nb::module_& m);

}  // namespace kt
