// SPDX-License-Identifier: Apache-2.0
#include <ops/kernels.hpp>

namespace cpx::detail {

template std::uint64_t mix_all<std::string_view>(std::uint64_t, std::string_view const&);
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

} // namespace cpx::detail
