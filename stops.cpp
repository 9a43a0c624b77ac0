#include <cpx/cuda/exchange.hpp>
