// llama.cpp's side of `llama_cpp.py`: quantises a GGUF file, or keeps a model open and times batches of random tokens
// on request, so that rounds of both programs can alternate in one run. Linked to libllama alone, whose C interface it
// uses; as in llama-bench nothing is sampled, so the price of choosing a token is left out, in llama.cpp's favour.
//
//   llama_speed quantise BF16.gguf TARGET.gguf Q8_0|Q4_K_M THREADS
//   llama_speed time MODEL.gguf THREADS
//     then on standard input, a line each:  CONTEXT PROMPT NEW STREAMS
//     answered by one line:                 seconds of the prompts, seconds of the new tokens
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>

#include "llama.h"

namespace {

constexpr int kBatch = 2048;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "llama_speed: %s\n", text.c_str());
  std::exit(1);
}

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

int quantise(const char* source, const char* target, const std::string& kind, int threads) {
  llama_model_quantize_params params = llama_model_quantize_default_params();
  if (kind != "Q8_0" && kind != "Q4_K_M") fail("expected Q8_0 or Q4_K_M, got " + kind);
  params.ftype = kind == "Q8_0" ? LLAMA_FTYPE_MOSTLY_Q8_0 : LLAMA_FTYPE_MOSTLY_Q4_K_M;
  params.nthread = threads;
  return static_cast<int>(llama_model_quantize(source, target, &params));
}

struct Timer {
  llama_model* model;
  int threads;
  llama_context* context = nullptr;
  int opened_tokens = 0, opened_streams = 0;
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  std::mt19937 random{0};

  // One context for each size that is asked for; the KV cache holds `tokens` of each of the streams.
  void open(int tokens, int streams) {
    if (context != nullptr && opened_tokens == tokens && opened_streams == streams) return;
    if (context != nullptr) llama_free(context);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(tokens * streams);
    params.n_batch = kBatch;
    params.n_ubatch = 512;
    params.n_seq_max = static_cast<uint32_t>(streams);
    params.n_threads = params.n_threads_batch = threads;
    context = llama_init_from_model(model, params);
    if (context == nullptr) fail("no context of " + std::to_string(tokens) + " tokens");
    opened_tokens = tokens;
    opened_streams = streams;
  }

  void add(int position, int stream, bool logits) {
    const int at = batch.n_tokens++;
    batch.token[at] = static_cast<llama_token>(3 + random() % 6000);
    batch.pos[at] = position;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = stream;
    batch.logits[at] = logits ? 1 : 0;
    if (batch.n_tokens == kBatch) decode();
  }

  void decode() {
    if (batch.n_tokens == 0) return;
    if (llama_decode(context, batch) != 0) fail("llama_decode failed");
    batch.n_tokens = 0;
  }

  void measure(int prompt, int fresh, int streams) {
    llama_memory_clear(llama_get_memory(context), true);
    const double begun = now();
    for (int stream = 0; stream < streams; ++stream)
      for (int at = 0; at < prompt; ++at) add(at, stream, at == prompt - 1);
    decode();
    llama_synchronize(context);
    const double read = now();
    for (int at = 0; at < fresh; ++at) {
      for (int stream = 0; stream < streams; ++stream) add(prompt + at, stream, true);
      decode();
      llama_synchronize(context);
    }
    std::printf("%.9f %.9f\n", read - begun, now() - read);
    std::fflush(stdout);
  }
};

void ignore_log(ggml_log_level, const char*, void*) {}

}  // namespace

int main(int count, char** words) {
  llama_log_set(ignore_log, nullptr);
  llama_backend_init();
  if (count == 6 && std::strcmp(words[1], "quantise") == 0)
    return quantise(words[2], words[3], words[4], std::atoi(words[5]));
  if (count != 4 || std::strcmp(words[1], "time") != 0)
    fail("expected: quantise SOURCE TARGET TYPE THREADS, or time MODEL THREADS");
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  Timer timer{llama_model_load_from_file(words[2], params), std::atoi(words[3])};
  if (timer.model == nullptr) fail(std::string("cannot open ") + words[2]);
  std::printf("%s\n", llama_print_system_info());
  std::fflush(stdout);
  int tokens = 0, prompt = 0, fresh = 0, streams = 0;
  while (std::cin >> tokens >> prompt >> fresh >> streams) {
    timer.open(tokens, streams);
    timer.measure(prompt, fresh, streams);
  }
  return 0;
}
