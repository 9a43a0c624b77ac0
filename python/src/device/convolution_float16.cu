// SPDX-License-Identifier: Apache-2.0
#include "convolution.cuh"

template void binding::convolve<__half>(device_group&, halo_value const&, convolution_call const&);
template void binding::convolve_backward<__half>(device_group&, halo_value const&, halo_value const&,
                                                 convolution_call const&);
