// SPDX-License-Identifier: Apache-2.0
// What computes longest in tests, compiled once for all of them and optimised, by kernels.cpp.
#pragma once

#include <cpx/core/hash.hpp>
#include <cpx/ops/local/attention.hpp>
#include <cpx/ops/local/attention_backward.hpp>
#include <cpx/ops/local/causal_conv.hpp>
#include <cpx/ops/local/delta_rule_backward.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/norm.hpp>
#include <cpx/testing/counted.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/threads.hpp>
#include <cpx/transport/transport_ref.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace cpx::detail {

extern template std::uint64_t
mix_all<std::array<std::uint64_t, identity::numbers_count>>(std::uint64_t,
                                                            std::array<std::uint64_t, identity::numbers_count> const&);
extern template class padded<float>;
extern template void weigh<float>(std::vector<float const*> const&, padded<float> const&, float const*, index_t,
                                  float*);
extern template void exchange_sum<float, float, threads>(plan const&, identity const&, rows<float> const&,
                                                         rows<float> const&, threads&, caller, char const*);
extern template void exchange_sum<float, float, counted<transport_ref>>(plan const&, identity const&,
                                                                        rows<float> const&, rows<float> const&,
                                                                        counted<transport_ref>&, caller, char const*);
extern template std::array<float, linear_rows * linear_outputs>
    products<float>(std::array<float const*, linear_rows>, std::array<float const*, linear_outputs>, index_t);
extern template void add_products<float>(rows<float const>, rows<float const>, rows<float>);
extern template void combine<float>(float const*, index_t, padded<float> const&, float, float*);
extern template void accumulate<float>(float const*, index_t, index_t, padded<float> const&, float*);
extern template padded<float> scaled_rows<float>(rows<float const>, bool, float);
extern template delta_chunk<float> prepare_chunk<float>(rows<float const>, rows<float const>, rows<float const>,
                                                        rows<float const>, bool);
extern template delta_reverse<float> reverse_chunk<float>(rows<float const>, rows<float const>, rows<float const>,
                                                          rows<float const>, rows<float const>,
                                                          delta_rule_options const&, padded<float> const&);
extern template delta_chunk_gradients<float> differentiate_chunk<float>(delta_reverse<float> const&,
                                                                        padded<float> const&, rows<float const>,
                                                                        rows<float const>, padded<float> const&,
                                                                        padded<float> const&);
extern template class padded<double>;
extern template void weigh<double>(std::vector<double const*> const&, padded<double> const&, double const*, index_t,
                                   double*);
extern template void exchange_sum<double, double, threads>(plan const&, identity const&, rows<double> const&,
                                                           rows<double> const&, threads&, caller, char const*);
extern template void exchange_sum<double, double, counted<transport_ref>>(plan const&, identity const&,
                                                                          rows<double> const&, rows<double> const&,
                                                                          counted<transport_ref>&, caller, char const*);
extern template std::array<double, linear_rows * linear_outputs>
    products<double>(std::array<double const*, linear_rows>, std::array<double const*, linear_outputs>, index_t);
extern template void add_products<double>(rows<double const>, rows<double const>, rows<double>);
extern template void combine<double>(double const*, index_t, padded<double> const&, double, double*);
extern template void accumulate<double>(double const*, index_t, index_t, padded<double> const&, double*);
extern template padded<double> scaled_rows<double>(rows<double const>, bool, double);
extern template delta_chunk<double> prepare_chunk<double>(rows<double const>, rows<double const>, rows<double const>,
                                                          rows<double const>, bool);
extern template delta_reverse<double> reverse_chunk<double>(rows<double const>, rows<double const>, rows<double const>,
                                                            rows<double const>, rows<double const>,
                                                            delta_rule_options const&, padded<double> const&);
extern template delta_chunk_gradients<double> differentiate_chunk<double>(delta_reverse<double> const&,
                                                                          padded<double> const&, rows<double const>,
                                                                          rows<double const>, padded<double> const&,
                                                                          padded<double> const&);
extern template struct delta_segment<float>;
extern template void delta_backward<float>(delta_segment<float> const&, rows<float const>, rows<float const>,
                                           rows<float>, delta_rule_gradients<float> const&);
extern template void delta_backward_fold<float>(delta_segment<float> const&, rows<float const>, rows<float>);
extern template void attend_one_head<float>(rows<float const>, std::span<index_t const>, rows<float const>,
                                            rows<float const>, float, rows<float>, std::span<float>);
extern template void backward_of_one_key_head<float>(attended_queries<float> const&, rows<float const>,
                                                     rows<float const>, std::span<index_t const>, float, rows<float>,
                                                     rows<float>);
extern template void backward_of_one_query_head<float>(attended_queries<float> const&, rows<float const>,
                                                       rows<float const>, float, rows<float>);
extern template void add_weight_terms<float>(rows<float const>, rows<float const>, rows<float const>, rows<float>,
                                             float*);
extern template void project<float>(rows<float const>, rows<float const>, rows<float>);
extern template void project_backward_input<float>(rows<float const>, rows<float const>, rows<float>);
extern template void project_backward_weight<float>(rows<float const>, rows<float const>, rows<float>);
extern template void exchange_sum<float const, float, threads>(plan const&, identity const&, rows<float const> const&,
                                                               rows<float> const&, threads&, caller, char const*);
extern template void require_shape<float>(char const*, char const*, rows<float>, index_t, index_t, caller);
extern template void require_shape<float const>(char const*, char const*, rows<float const>, index_t, index_t, caller);
extern template void check_buffer<float>(char const*, char const*, rows<float> const&, end_shape const&, caller);
extern template void check_buffer<float const>(char const*, char const*, rows<float const> const&, end_shape const&,
                                               caller);
extern template struct delta_segment<double>;
extern template void delta_backward<double>(delta_segment<double> const&, rows<double const>, rows<double const>,
                                            rows<double>, delta_rule_gradients<double> const&);
extern template void delta_backward_fold<double>(delta_segment<double> const&, rows<double const>, rows<double>);
extern template void attend_one_head<double>(rows<double const>, std::span<index_t const>, rows<double const>,
                                             rows<double const>, double, rows<double>, std::span<double>);
extern template void backward_of_one_key_head<double>(attended_queries<double> const&, rows<double const>,
                                                      rows<double const>, std::span<index_t const>, double,
                                                      rows<double>, rows<double>);
extern template void backward_of_one_query_head<double>(attended_queries<double> const&, rows<double const>,
                                                        rows<double const>, double, rows<double>);
extern template void add_weight_terms<double>(rows<double const>, rows<double const>, rows<double const>, rows<double>,
                                              double*);
extern template void project<double>(rows<double const>, rows<double const>, rows<double>);
extern template void project_backward_input<double>(rows<double const>, rows<double const>, rows<double>);
extern template void project_backward_weight<double>(rows<double const>, rows<double const>, rows<double>);
extern template void exchange_sum<double const, double, threads>(plan const&, identity const&,
                                                                 rows<double const> const&, rows<double> const&,
                                                                 threads&, caller, char const*);
extern template void require_shape<double>(char const*, char const*, rows<double>, index_t, index_t, caller);
extern template void require_shape<double const>(char const*, char const*, rows<double const>, index_t, index_t,
                                                 caller);
extern template void check_buffer<double>(char const*, char const*, rows<double> const&, end_shape const&, caller);
extern template void check_buffer<double const>(char const*, char const*, rows<double const> const&, end_shape const&,
                                                caller);

} // namespace cpx::detail

namespace cpx {

extern template void rms_norm<float>(rows<float const>, std::span<float const>, float, float, rows<float>, caller);
extern template void gated_rms_norm<float>(rows<float const>, rows<float const>, std::span<float const>, float,
                                           rows<float>, caller);
extern template void rms_norm_backward<float>(rows<float const>, std::span<float const>, float, float,
                                              rows<float const>, rows<float>, std::span<float>, caller);
extern template void gated_rms_norm_backward<float>(rows<float const>, rows<float const>, std::span<float const>, float,
                                                    rows<float const>, rows<float>, rows<float>, std::span<float>,
                                                    caller);
extern template void rms_norm<double>(rows<double const>, std::span<double const>, double, double, rows<double>,
                                      caller);
extern template void gated_rms_norm<double>(rows<double const>, rows<double const>, std::span<double const>, double,
                                            rows<double>, caller);
extern template void rms_norm_backward<double>(rows<double const>, std::span<double const>, double, double,
                                               rows<double const>, rows<double>, std::span<double>, caller);
extern template void gated_rms_norm_backward<double>(rows<double const>, rows<double const>, std::span<double const>,
                                                     double, rows<double const>, rows<double>, rows<double>,
                                                     std::span<double>, caller);

} // namespace cpx
