// SPDX-License-Identifier: Apache-2.0
#include <ops/kernels.hpp>

namespace cpx::detail {

template std::uint64_t
mix_all<std::array<std::uint64_t, identity::numbers_count>>(std::uint64_t,
                                                            std::array<std::uint64_t, identity::numbers_count> const&);
template class padded<float>;
template void weigh<float>(std::vector<float const*> const&, padded<float> const&, float const*, index_t, float*);
template void exchange_sum<float, float, threads>(plan const&, identity const&, rows<float> const&, rows<float> const&,
                                                  threads&, caller, char const*);
template void exchange_sum<float, float, counted<transport_ref>>(plan const&, identity const&, rows<float> const&,
                                                                 rows<float> const&, counted<transport_ref>&, caller,
                                                                 char const*);
template std::array<float, linear_rows * linear_outputs>
    products<float>(std::array<float const*, linear_rows>, std::array<float const*, linear_outputs>, index_t);
template void add_products<float>(rows<float const>, rows<float const>, rows<float>);
template void combine<float>(float const*, index_t, padded<float> const&, float, float*);
template void accumulate<float>(float const*, index_t, index_t, padded<float> const&, float*);
template padded<float> scaled_rows<float>(rows<float const>, bool, float);
template delta_chunk<float> prepare_chunk<float>(rows<float const>, rows<float const>, rows<float const>,
                                                 rows<float const>, bool);
template delta_reverse<float> reverse_chunk<float>(rows<float const>, rows<float const>, rows<float const>,
                                                   rows<float const>, rows<float const>, delta_rule_options const&,
                                                   padded<float> const&);
template delta_chunk_gradients<float> differentiate_chunk<float>(delta_reverse<float> const&, padded<float> const&,
                                                                 rows<float const>, rows<float const>,
                                                                 padded<float> const&, padded<float> const&);
template class padded<double>;
template void weigh<double>(std::vector<double const*> const&, padded<double> const&, double const*, index_t, double*);
template void exchange_sum<double, double, threads>(plan const&, identity const&, rows<double> const&,
                                                    rows<double> const&, threads&, caller, char const*);
template void exchange_sum<double, double, counted<transport_ref>>(plan const&, identity const&, rows<double> const&,
                                                                   rows<double> const&, counted<transport_ref>&, caller,
                                                                   char const*);
template std::array<double, linear_rows * linear_outputs>
    products<double>(std::array<double const*, linear_rows>, std::array<double const*, linear_outputs>, index_t);
template void add_products<double>(rows<double const>, rows<double const>, rows<double>);
template void combine<double>(double const*, index_t, padded<double> const&, double, double*);
template void accumulate<double>(double const*, index_t, index_t, padded<double> const&, double*);
template padded<double> scaled_rows<double>(rows<double const>, bool, double);
template delta_chunk<double> prepare_chunk<double>(rows<double const>, rows<double const>, rows<double const>,
                                                   rows<double const>, bool);
template delta_reverse<double> reverse_chunk<double>(rows<double const>, rows<double const>, rows<double const>,
                                                     rows<double const>, rows<double const>, delta_rule_options const&,
                                                     padded<double> const&);
template delta_chunk_gradients<double> differentiate_chunk<double>(delta_reverse<double> const&, padded<double> const&,
                                                                   rows<double const>, rows<double const>,
                                                                   padded<double> const&, padded<double> const&);
template struct delta_segment<float>;
template void delta_backward<float>(delta_segment<float> const&, rows<float const>, rows<float const>, rows<float>,
                                    delta_rule_gradients<float> const&);
template void delta_backward_fold<float>(delta_segment<float> const&, rows<float const>, rows<float>);
template void attend_one_head<float>(rows<float const>, std::span<index_t const>, rows<float const>, rows<float const>,
                                     float, rows<float>, std::span<float>);
template void backward_of_one_key_head<float>(attended_queries<float> const&, rows<float const>, rows<float const>,
                                              std::span<index_t const>, float, rows<float>, rows<float>);
template void backward_of_one_query_head<float>(attended_queries<float> const&, rows<float const>, rows<float const>,
                                                float, rows<float>);
template void add_weight_terms<float>(rows<float const>, rows<float const>, rows<float const>, rows<float>, float*);
template void project<float>(rows<float const>, rows<float const>, rows<float>);
template void project_backward_input<float>(rows<float const>, rows<float const>, rows<float>);
template void project_backward_weight<float>(rows<float const>, rows<float const>, rows<float>);
template void exchange_sum<float const, float, threads>(plan const&, identity const&, rows<float const> const&,
                                                        rows<float> const&, threads&, caller, char const*);
template void require_shape<float>(char const*, char const*, rows<float>, index_t, index_t, caller);
template void require_shape<float const>(char const*, char const*, rows<float const>, index_t, index_t, caller);
template void check_buffer<float>(char const*, char const*, rows<float> const&, end_shape const&, caller);
template void check_buffer<float const>(char const*, char const*, rows<float const> const&, end_shape const&, caller);
template struct delta_segment<double>;
template void delta_backward<double>(delta_segment<double> const&, rows<double const>, rows<double const>, rows<double>,
                                     delta_rule_gradients<double> const&);
template void delta_backward_fold<double>(delta_segment<double> const&, rows<double const>, rows<double>);
template void attend_one_head<double>(rows<double const>, std::span<index_t const>, rows<double const>,
                                      rows<double const>, double, rows<double>, std::span<double>);
template void backward_of_one_key_head<double>(attended_queries<double> const&, rows<double const>, rows<double const>,
                                               std::span<index_t const>, double, rows<double>, rows<double>);
template void backward_of_one_query_head<double>(attended_queries<double> const&, rows<double const>,
                                                 rows<double const>, double, rows<double>);
template void add_weight_terms<double>(rows<double const>, rows<double const>, rows<double const>, rows<double>,
                                       double*);
template void project<double>(rows<double const>, rows<double const>, rows<double>);
template void project_backward_input<double>(rows<double const>, rows<double const>, rows<double>);
template void project_backward_weight<double>(rows<double const>, rows<double const>, rows<double>);
template void exchange_sum<double const, double, threads>(plan const&, identity const&, rows<double const> const&,
                                                          rows<double> const&, threads&, caller, char const*);
template void require_shape<double>(char const*, char const*, rows<double>, index_t, index_t, caller);
template void require_shape<double const>(char const*, char const*, rows<double const>, index_t, index_t, caller);
template void check_buffer<double>(char const*, char const*, rows<double> const&, end_shape const&, caller);
template void check_buffer<double const>(char const*, char const*, rows<double const> const&, end_shape const&, caller);

} // namespace cpx::detail

namespace cpx {

template void rms_norm<float>(rows<float const>, std::span<float const>, float, float, rows<float>, caller);
template void gated_rms_norm<float>(rows<float const>, rows<float const>, std::span<float const>, float, rows<float>,
                                    caller);
template void rms_norm_backward<float>(rows<float const>, std::span<float const>, float, float, rows<float const>,
                                       rows<float>, std::span<float>, caller);
template void gated_rms_norm_backward<float>(rows<float const>, rows<float const>, std::span<float const>, float,
                                             rows<float const>, rows<float>, rows<float>, std::span<float>, caller);
template void rms_norm<double>(rows<double const>, std::span<double const>, double, double, rows<double>, caller);
template void gated_rms_norm<double>(rows<double const>, rows<double const>, std::span<double const>, double,
                                     rows<double>, caller);
template void rms_norm_backward<double>(rows<double const>, std::span<double const>, double, double, rows<double const>,
                                        rows<double>, std::span<double>, caller);
template void gated_rms_norm_backward<double>(rows<double const>, rows<double const>, std::span<double const>, double,
                                              rows<double const>, rows<double>, rows<double>, std::span<double>,
                                              caller);

} // namespace cpx
