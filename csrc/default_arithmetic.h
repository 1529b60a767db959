// The default floating-point environment, in a scope: results must not depend on what a calling thread has set (flushed
// denormals, another rounding mode), nor on which thread computes what.
#pragma once

#include <cfenv>

namespace kt {

class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace kt
