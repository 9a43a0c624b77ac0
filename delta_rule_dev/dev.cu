#include <cpx/cuda/gated_delta_rule.hpp>
#include <cpx/ops/local/delta_rule_backward.hpp>
#include <cstdio>
#include <random>
#include <thread>
#include <functional>
#include <string>
using namespace cpx::cuda; using cpx::index_t; using cpx::rows; using bf=__nv_bfloat16;
template<class T> double up(T x){return (double)(float)x;}
struct Data{ int hk,hv,dk,dv; std::vector<index_t> off; std::vector<double> q,k,v,g,b,s0,dout,dlast; index_t T; int N;};
template<class T> Data make(int hk,int hv,int dk,int dv,std::vector<index_t> lens,std::string kind,unsigned seed,bool state){
 Data d{hk,hv,dk,dv}; d.off={0}; for(auto l:lens)d.off.push_back(d.off.back()+l); d.T=d.off.back(); d.N=lens.size();
 std::mt19937 r(seed); std::normal_distribution<double> nd; auto R=[](double x){return up((T)(float)x);};
 auto rowsn=[&](std::vector<double>&x,int h,int dim,bool norm){ x.resize(d.T*h*dim); std::vector<double> base(dim); for(auto&z:base)z=nd(r);
  for(index_t i=0;i<d.T*h;i++){double ss=0; for(int j=0;j<dim;j++){double z=nd(r); if(kind=="same"&&norm) z=base[j]+.02*z; x[i*dim+j]=z; ss+=z*z;} for(int j=0;j<dim;j++) x[i*dim+j]=R(norm?x[i*dim+j]/std::sqrt(ss):x[i*dim+j]);}};
 rowsn(d.q,hk,dk,true); rowsn(d.k,hk,dk,true); rowsn(d.v,hv,dv,false); rowsn(d.dout,hv,dv,false);
 d.g.resize(d.T*hv); d.b.resize(d.T*hv); std::uniform_real_distribution<double> u;
 for(index_t i=0;i<d.T*hv;i++){ d.b[i]=(float)(1/(1+std::exp(-nd(r)))); d.g[i]=(float)(std::log(1/(1+std::exp(-nd(r))))/16);
  if(kind=="nodecay"||kind=="same"||kind=="beta2")d.g[i]=0; if(kind=="beta2")d.b[i]=1.999f; if(kind=="strong")d.g[i]*=320; if(kind=="spikes")d.g[i]=u(r)<.02?-100:0; if(kind=="inf")d.g[i]=u(r)<.05?-INFINITY:d.g[i]; if(kind=="beta01")d.b[i]=u(r)<.5;}
 d.s0.assign((size_t)d.N*hv*dk*dv,0); d.dlast=d.s0; if(state){for(auto&x:d.s0)x=(float)nd(r)*.1; for(auto&x:d.dlast)x=(float)nd(r);}
 return d;}
struct Res{std::vector<double> o,s,dq,dk,dv,dg,db,ds;};
Res host(Data const&d,bool back){ Res r; r.o.resize(d.T*d.hv*d.dv); r.s=d.s0; if(back){r.dq.assign(d.q.size(),0);r.dk=r.dq;r.dv.assign(d.v.size(),0);r.dg.assign(d.g.size(),0);r.db=r.dg;r.ds=d.dlast;}
 int grp=d.hv/d.hk; std::vector<std::thread> th; 
 auto job=[&](int n,int hk){ index_t a=d.off[n],c=d.off[n+1]-a; if(c==0)return; for(int h=hk*grp;h<hk*grp+grp;h++){
  auto V=[&](std::vector<double> const&x,int hh,int H,int D){return rows<double const>(x.data()+(a*H+hh)*D,c,D,(index_t)H*D);};
  auto W=[&](std::vector<double>&x,int hh,int H,int D){return rows<double>(x.data()+(a*H+hh)*D,c,D,(index_t)H*D);};
  cpx::delta_rule_options o; o.qk_l2norm=false; size_t st=(size_t)(n*d.hv+h)*d.dk*d.dv;
  cpx::delta_rule_forward<double>(V(d.q,hk,d.hk,d.dk),V(d.k,hk,d.hk,d.dk),V(d.v,h,d.hv,d.dv),V(d.g,h,d.hv,1),V(d.b,h,d.hv,1),0,o,rows<double>(r.s.data()+st,d.dk,d.dv),W(r.o,h,d.hv,d.dv));
  if(back) cpx::delta_rule_backward<double>(V(d.q,hk,d.hk,d.dk),V(d.k,hk,d.hk,d.dk),V(d.v,h,d.hv,d.dv),V(d.g,h,d.hv,1),V(d.b,h,d.hv,1),0,o,rows<double const>(d.s0.data()+st,d.dk,d.dv),V(d.dout,h,d.hv,d.dv),rows<double>(r.ds.data()+st,d.dk,d.dv),{W(r.dq,hk,d.hk,d.dk),W(r.dk,hk,d.hk,d.dk),W(r.dv,h,d.hv,d.dv),W(r.dg,h,d.hv,1),W(r.db,h,d.hv,1)});
 }};
 for(int n=0;n<d.N;n++)for(int h=0;h<d.hk;h++){ if(th.size()>=16){for(auto&t:th)t.join();th.clear();} th.emplace_back(job,n,h);} for(auto&t:th)t.join(); return r;}
template<class T,class U> std::vector<T> cv(std::vector<U> const&x){std::vector<T> r(x.size()); for(size_t i=0;i<x.size();i++)r[i]=(T)(float)x[i]; return r;}
template<class T> double err(std::vector<T> const&a,std::vector<double> const&b){double n=0,e=0;for(size_t i=0;i<b.size();i++){double z=up(a[i])-b[i];e+=z*z;n+=b[i]*b[i];}return std::sqrt(n>0?e/n:e);}
template<class T> struct Dev{ Data const&d; buffer<T> q,k,v,o,dout,dq,dk,dv; buffer<float> g,b,s0,s,dlast,dg,db,ds; buffer<index_t> off; buffer<char> ws;
 template<class U> static buffer<U> B(std::vector<U> const&x){return buffer<U>(std::span<U const>(x));}
 Dev(Data const&D):d(D),q(B(cv<T>(D.q))),k(B(cv<T>(D.k))),v(B(cv<T>(D.v))),o(D.v.size()),dout(B(cv<T>(D.dout))),dq(D.q.size()),dk(D.q.size()),dv(D.v.size()),g(B(cv<float>(D.g))),b(B(cv<float>(D.b))),s0(B(cv<float>(D.s0))),s(D.s0.size()),dlast(B(cv<float>(D.dlast))),dg(D.g.size()),db(D.g.size()),ds(D.s0.size()),off(B(D.off)){}
 gated_delta_rule_input<T> in(){return {{q.data(),d.T,d.hk*d.dk},{k.data(),d.T,d.hk*d.dk},{v.data(),d.T,d.hv*d.dv},{g.data(),d.T,d.hv},{b.data(),d.T,d.hv},{off.data(),(size_t)off.size()},{s0.data(),(size_t)s0.size()}};}
 gated_delta_rule_shape shape(){gated_delta_rule_shape s; s.key_heads=d.hk;s.value_heads=d.hv;s.key_dim=d.dk;s.value_dim=d.dv;return s;}
 delta_rule_path fwd(gated_delta_rule_shape sh,cudaStream_t st){ return gated_delta_rule<T>(sh,in(),rows<T>(o.data(),d.T,d.hv*d.dv),std::span<float>(s.data(),(size_t)s.size()),std::span<char>(ws.data(),(size_t)ws.size()),st);}
 void poison(){ cudaMemset(o.data(),0xff,o.size()*sizeof(T)); cudaMemset(s.data(),0xff,s.size()*4); if(ws.size())cudaMemset(ws.data(),0xff,ws.size());}
};
// units
namespace D=cpx::kernels::delta; using cpx::kernels::delta_gates;
__global__ void __launch_bounds__(128) units(float*out){ extern __shared__ __align__(1024) char raw[]; char*q=raw,*k=raw+16384,*a=raw+32768,*p=a+8192,*x=p+8192,*v=x+16384,*ot=v+16384; __shared__ delta_gates g;
 int t=threadIdx.x; auto val=[](int s,int r,int c){return (float)(((r*37+c*11+s*13+r*c)%17)-8)/8.f;};
 auto put=[&](char*tile,int s,int cols,bool tri){for(int i=t;i<64*cols;i+=128){int r=i/cols,c=i%cols;*(bf*)(tile+c/64*8192+D::swizzled(r,c%64/8)+c%8*2)=(bf)(tri&&c>r?0.f:val(s,r,c));}};
 put(q,1,128,false);put(k,2,128,false);put(a,3,64,true);put(v,4,128,false); if(t<64){g.sum[t]=-t*.05f;g.beta[t]=.5f+t/128.f;g.decay[t]=exp2f(g.sum[t]);g.onward[t]=g.beta[t]*exp2f(g.sum[63]-g.sum[t]); for(int i=0;i<3;i++)g.until[i][t]=t<16*i+16?g.beta[t]*exp2f(-(16*i+16)*.05f-g.sum[t]):0.f;}
 cutlass::arch::fence_view_async_shared(); __syncthreads();
 uint32_t w[16]; D::compute_p(q,k,a,g,.25f,w); D::store_operand(w,p); D::compute_x(a,k,g,x,[](int){}); cutlass::arch::fence_view_async_shared(); __syncthreads();
 auto get=[&](char*tile,int r,int c){return (float)*(bf*)(tile+c/64*8192+D::swizzled(r,c%64/8)+c%8*2);};
 for(int i=t;i<4096;i+=128)out[i]=get(p,i/64,i%64); for(int i=t;i<8192;i+=128)out[4096+i]=get(x,i/128,i%128);
 D::half_state s; D::for_each_word([&](int i,int vv,int kk){s[i]=val(5,vv,kk);}); uint32_t f[32],vw[16],y[16]; D::round_to_operand(s,f); float ks[32]; D::keep(ks); cute::warpgroup_arrive(); D::multiply_along<8>(ks,f,k,false); cute::warpgroup_commit_batch(); cute::warpgroup_wait<0>(); D::keep(ks);
 int lane=t%32,wp=t/32; for(int i=0;i<32;i++){int vv=16*wp+lane/4+i/2%2*8,tok=8*(i/4)+lane%4*2+i%2; out[12288+tok*64+vv]=ks[i];}
 D::load_transposed(v,vw); D::token_decays e; D::load_decays(g,e); D::subtract(vw,ks,e,y); D::store_transposed(y,ot); __syncthreads(); for(int i=t;i<4096;i+=128)out[16384+i]=get(ot,i/64,i%64);
 D::keep(s); cute::warpgroup_arrive(); D::multiply_down(s,y,x,true); cute::warpgroup_commit_batch(); cute::warpgroup_wait<0>(); D::keep(s);
 D::for_each_word([&](int i,int vv,int kk){out[20480+kk*64+vv]=s[i];});
 float o[32]; D::keep(o); cute::warpgroup_arrive(); D::multiply_along<4>(o,y,p,false); cute::warpgroup_commit_batch(); cute::warpgroup_wait<0>(); D::keep(o);
 for(int i=0;i<32;i++){int vv=16*wp+lane/4+i/2%2*8,tok=8*(i/4)+lane%4*2+i%2; out[28672+tok*64+vv]=o[i];}
}
void unit_test(){ buffer<float> out(32768); cudaFuncSetAttribute(units,cudaFuncAttributeMaxDynamicSharedMemorySize,100000); units<<<1,128,100000>>>(out.data()); auto e=cudaDeviceSynchronize(); printf("units: %s\n",cudaGetErrorString(e)); if(e)exit(1); auto r=out.read();
 auto val=[](int s,int r,int c){return (double)(((r*37+c*11+s*13+r*c)%17)-8)/8.;}; auto rb=[](double x){return up((bf)(float)x);};
 auto A=[&](int i,int j){return j>i?0.:val(3,i,j);}; std::vector<double> G(64),b(64); for(int i=0;i<64;i++){G[i]=(float)(-i*.05f);b[i]=.5+i/128.;}
 auto cmp=[&](char const*name,int at,int R,int C,std::function<double(int,int)> f){double e=0,n=0;int bad=0,br=-1,bc=-1;for(int i=0;i<R;i++)for(int j=0;j<C;j++){double x=f(i,j),z=r[at+i*C+j]-x;e+=z*z;n+=x*x;if(std::abs(z)>.02*(std::abs(x)+1)&&!bad++)br=i,bc=j;}printf("unit %-10s error %.2e bad %d first %d %d\n",name,std::sqrt(e/n),bad,br,bc);};
 std::vector<double> BA(4096),P(4096),X(8192),Y(4096),KS(4096); for(int i=0;i<64;i++)for(int j=0;j<64;j++){double s=0;for(int l=0;l<=i;l++){double qk=0;for(int d=0;d<128;d++)qk+=val(1,i,d)*val(2,l,d);s+=rb(qk)*A(l,j);}BA[i*64+j]=s;}
 cmp("P",0,64,64,[&](int i,int j){return j<=i?.25*BA[i*64+j]*b[j]*std::exp2(G[i]-G[j]):0.;}); cmp("X",4096,64,128,[&](int j,int d){double s=0;for(int i=0;i<64;i++)s+=A(i,j)*val(2,i,d);return s*b[j]*std::exp2(G[63]-G[j]);});
 cmp("K S",12288,64,64,[&](int t,int v){double s=0;for(int d=0;d<128;d++)s+=val(2,t,d)*rb(val(5,v,d));return KS[t*64+v]=s;});
 cmp("Y",16384,64,64,[&](int t,int v){return val(4,t,v)-std::exp2(G[t])*KS[t*64+v];}); for(int i=0;i<4096;i++)Y[i]=r[16384+i];
 cmp("S",20480,128,64,[&](int k,int v){double s=val(5,v,k);for(int t=0;t<64;t++)s+=r[4096+t*128+k]*Y[t*64+v];return s;}); cmp("P Y",28672,64,64,[&](int t,int v){double s=0;for(int j=0;j<64;j++)s+=r[t*64+j]*Y[j*64+v];return s;});
}
template<class T> void check(char const*name,Data const&d,Res const&h,gated_delta_rule_shape sh,Dev<T>&x,cudaStream_t st,std::vector<T>*bits=nullptr){
 x.ws=buffer<char>(gated_delta_rule_workspace<T>(sh,d.T,d.N)+1024); x.poison(); auto p=x.fwd(sh,st); auto e=cudaDeviceSynchronize(); if(e){printf("%s: CUDA %s\n",name,cudaGetErrorString(e));exit(1);}
 auto o=x.o.read(); auto s=x.s.read(); double eo=err(o,h.o),es=err(s,h.s); char const*same=""; if(bits){ if(bits->empty())*bits=o; else same=memcmp(bits->data(),o.data(),o.size()*sizeof(T))?" BITS DIFFER":" same bits";}
 printf("%-34s path %d part %ld: o %.2e state %.2e%s\n",name,(int)p,(long)sh.part,eo,es,same);
 if(!(eo<3e-2)&&sizeof(T)==2){ int shown=0; for(int n=0;n<d.N&&shown<24;n++)for(int hh=0;hh<d.hv&&shown<24;hh++)for(index_t c=d.off[n];c<d.off[n+1]&&shown<24;c+=64){double ee=0,nn=0;double halves[2]={0,0};int badrow=-1;for(index_t i=c;i<std::min(c+64,d.off[n+1]);i++)for(int j=0;j<d.dv;j++){double b=h.o[(i*d.hv+hh)*d.dv+j],z=up(o[(i*d.hv+hh)*d.dv+j])-b;ee+=z*z;nn+=b*b;halves[j>=64]+=z*z;if(!(std::abs(z)<.1)&&badrow<0)badrow=i-c;} if(!(std::sqrt(ee/nn)<3e-2)){printf("   seq %d head %d chunk %ld: %.2e halves %.1e %.1e first bad row %d\n",n,hh,(long)((c-d.off[n])/64),std::sqrt(ee/nn),std::sqrt(halves[0]/nn),std::sqrt(halves[1]/nn),badrow);shown++;}}}
 fflush(stdout);}
template<class T> void backward(char const*name,Data const&d,Res const&h,Dev<T>&x,cudaStream_t st){ auto sh=x.shape(); x.ws=buffer<char>(gated_delta_rule_backward_workspace<T>(sh,d.T,d.N)+1024); cudaMemset(x.ws.data(),0xff,x.ws.size());
 gated_delta_rule_gradients<T> to{{x.dq.data(),d.T,d.hk*d.dk},{x.dk.data(),d.T,d.hk*d.dk},{x.dv.data(),d.T,d.hv*d.dv},{x.dg.data(),d.T,d.hv},{x.db.data(),d.T,d.hv},{x.ds.data(),(size_t)x.ds.size()}};
 gated_delta_rule_backward<T>(sh,x.in(),rows<T const>(x.dout.data(),d.T,d.hv*d.dv),std::span<float const>(x.dlast.data(),(size_t)x.dlast.size()),to,std::span<char>(x.ws.data(),(size_t)x.ws.size()),st); auto e=cudaDeviceSynchronize(); if(e){printf("%s: CUDA %s\n",name,cudaGetErrorString(e));exit(1);}
 printf("%-34s backward: dq %.1e dk %.1e dv %.1e dg %.1e db %.1e ds %.1e\n",name,err(x.dq.read(),h.dq),err(x.dk.read(),h.dk),err(x.dv.read(),h.dv),err(x.dg.read(),h.dg),err(x.db.read(),h.db),err(x.ds.read(),h.ds));fflush(stdout);}
__global__ void fill(bf*p,size_t n,unsigned seed,float sc){for(size_t i=blockIdx.x*(size_t)blockDim.x+threadIdx.x;i<n;i+=(size_t)gridDim.x*blockDim.x){uint64_t z=(i+1)*0x9e3779b97f4a7c15ull*(seed+1);z^=z>>29;z*=0xbf58476d1ce4e5b9ull;z^=z>>32;p[i]=(bf)(((float)(z&0xffff)/32768.f-1.f)*sc);}}
__global__ void fillf(float*p,size_t n,unsigned seed,float lo,float hi){for(size_t i=blockIdx.x*(size_t)blockDim.x+threadIdx.x;i<n;i+=(size_t)gridDim.x*blockDim.x){uint64_t z=(i+1)*0x9e3779b97f4a7c15ull*(seed+1);z^=z>>29;z*=0xbf58476d1ce4e5b9ull;z^=z>>32;p[i]=lo+(hi-lo)*(float)(z&0xffff)/65536.f;}}
void bench(int hk,int hv,std::vector<index_t> lens,std::vector<int> parts,cudaStream_t st){ Data d{hk,hv,128,128}; d.off={0};for(auto l:lens)d.off.push_back(d.off.back()+l);d.T=d.off.back();d.N=lens.size();
 buffer<bf> q(d.T*hk*128),k(d.T*hk*128),v(d.T*hv*128),o(d.T*hv*128); buffer<float> g(d.T*hv),b(d.T*hv),s(d.N*(size_t)hv*16384); buffer<index_t> off{std::span<index_t const>(d.off)};
 fill<<<1024,256>>>(q.data(),q.size(),1,.15f);fill<<<1024,256>>>(k.data(),k.size(),2,.15f);fill<<<1024,256>>>(v.data(),v.size(),3,1);fillf<<<1024,256>>>(g.data(),g.size(),4,-.1f,0);fillf<<<1024,256>>>(b.data(),b.size(),5,0,1);cudaDeviceSynchronize();
 for(int part:parts){gated_delta_rule_shape sh;sh.key_heads=hk;sh.value_heads=hv;sh.part=part; buffer<char> ws(gated_delta_rule_workspace<bf>(sh,d.T,d.N)+1024);
 gated_delta_rule_input<bf> in{{q.data(),d.T,hk*128},{k.data(),d.T,hk*128},{v.data(),d.T,hv*128},{g.data(),d.T,hv},{b.data(),d.T,hv},{off.data(),(size_t)off.size()},{}};
 auto run=[&]{gated_delta_rule<bf>(sh,in,rows<bf>(o.data(),d.T,hv*128),std::span<float>(s.data(),(size_t)s.size()),std::span<char>(ws.data(),(size_t)ws.size()),st);};
 run(); auto e=cudaDeviceSynchronize(); if(e){printf("bench CUDA %s\n",cudaGetErrorString(e));exit(1);}
 cudaGraph_t gr;cudaGraphExec_t ex;cudaStreamBeginCapture(st,cudaStreamCaptureModeThreadLocal);run();cudaStreamEndCapture(st,&gr);e=cudaGraphInstantiate(&ex,gr,0);if(e)printf("graph %s\n",cudaGetErrorString(e));
 cudaEvent_t a,c;cudaEventCreate(&a);cudaEventCreate(&c);std::vector<float> ts;for(int i=0;i<25;i++){cudaEventRecord(a,st);for(int j=0;j<4;j++)cudaGraphLaunch(ex,st);cudaEventRecord(c,st);cudaEventSynchronize(c);float ms;cudaEventElapsedTime(&ms,a,c);ts.push_back(ms/4);}std::sort(ts.begin(),ts.end());
 // stages alone, in order
 namespace dt=cpx::cuda::detail; auto sp=dt::delta_forward_space<bf>(sh,d.T,d.N); auto K=dt::panels_of(in.k,cpx::caller::here()),V=dt::panels_of(in.v,cpx::caller::here()),Q=dt::panels_of(in.q,cpx::caller::here()),O=dt::panels_of(rows<bf>(o.data(),d.T,hv*128),cpx::caller::here());
 cpx::kernels::delta_prepared pr{ws.data()+sp.inverse,(delta_gates*)(ws.data()+sp.gates)}; auto plan=dt::delta_plan_at(sh,sp,ws.data()); cpx::kernels::delta_walk wk{plan,pr,nullptr,s.data(),(float*)(ws.data()+sp.snapshots),hk,hv/hk,.0884f};
 auto tm=[&](auto f){std::vector<float> t2;for(int i=0;i<9;i++){cudaEventRecord(a,st);f();cudaEventRecord(c,st);cudaEventSynchronize(c);float ms;cudaEventElapsedTime(&ms,a,c);t2.push_back(ms);}std::sort(t2.begin(),t2.end());return t2[4];};
 float tp=tm([&]{dt::launch_hopper(cpx::kernels::delta_rule_prep,sp.chunks*hk,128,sizeof(D::prep_memory),st,"p",cpx::caller::here(),K,cpx::kernels::delta_prep_input{plan,dt::delta_view(in.g),dt::delta_view(in.beta),hk,hv/hk},pr);});
 float tst=0; if(sp.states_first)tst=tm([&]{dt::launch_hopper(cpx::kernels::delta_rule_state,(index_t)d.N*hv*2,384,sizeof(D::state_memory),st,"s",cpx::caller::here(),K,V,wk);});
 float tmn=tm([&]{dt::launch_hopper(cpx::kernels::delta_rule_main,sp.parts*hv,512,sizeof(D::main_memory),st,"m",cpx::caller::here(),Q,K,V,O,wk,cpx::kernels::delta_output{dt::delta_view(rows<bf>(o.data(),d.T,hv*128)),false});});
 printf("bench %zux%-7ld %d/%d part %8d: all %.4f ms (min %.4f)  prep %.4f state %.4f main %.4f\n",lens.size(),(long)lens[0],hk,hv,part,ts[12],ts[0],tp,tst,tmn);fflush(stdout);cudaGraphExecDestroy(ex);cudaGraphDestroy(gr);}
}
int main(int argc,char**argv){ cudaStream_t st;cudaStreamCreate(&st); std::string what=argc>1?argv[1]:"all";
 if(what=="san"){ auto d=make<bf>(1,2,128,128,{100,0,64,130},"mild",3,true);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();for(int part:{1,0}){sh.part=part;check("sanitizer",d,h,sh,x,st);} sh.path=delta_rule_path::plain; check("plain",d,h,sh,x,st); return 0;}
 if(what=="prof"){bench(16,32,{8192,8192,8192,8192},{0},st);return 0;} if(what=="prof2"){bench(16,32,{32768},{16},st);return 0;} if(what=="quick"){unit_test();for(auto kind:{"mild","beta2","spikes","inf"}){auto d=make<bf>(2,4,128,128,{200,311,0,513},kind,5,true);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();std::vector<bf> bits;for(int part:{0,1,4,100}){sh.part=part;check((std::string("tensor ")+kind).c_str(),d,h,sh,x,st,&bits);}} {auto d=make<bf>(4,8,128,128,{3000,1000},"mild",13,true);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();sh.part=4;std::vector<bf> bits;check("repeat",d,h,sh,x,st,&bits);int diff=0;for(int i=0;i<1000;i++){x.fwd(sh,st);if(i%50==49){cudaDeviceSynchronize();auto o=x.o.read();diff+=memcmp(o.data(),bits.data(),o.size()*2)!=0;}}printf("repeat: %d of 20 differ\n",diff);} what="bench";}
 if(what=="bench"){bench(16,32,{32768},{16},st);bench(16,32,{8192,8192,8192,8192},{0},st);bench(16,32,{8192},{16,8},st);bench(2,8,{32768},{16},st);bench(16,32,{131072},{32},st);return 0;}
 unit_test();
 {auto d=make<float>(2,4,40,24,{70,0,1,130,64},"mild",1,true);auto h=host(d,true);Dev<float> x(d);check("float 40x24",d,h,x.shape(),x,st);backward("float 40x24",d,h,x,st);}
 {auto d=make<float>(1,3,128,128,{200},"spikes",2,true);auto h=host(d,true);Dev<float> x(d);check("float spikes",d,h,x.shape(),x,st);backward("float spikes",d,h,x,st);}
 {auto d=make<float>(1,1,200,33,{200,3},"inf",2,true);auto h=host(d,true);Dev<float> x(d);check("float inf 200x33",d,h,x.shape(),x,st);backward("float inf 200x33",d,h,x,st);}
 for(auto kind:{"mild","strong","inf"}){auto d=make<bf>(2,4,128,128,{200,311,513},kind,7,true);auto h=host(d,true);Dev<bf> x(d);auto sh=x.shape();sh.path=delta_rule_path::plain;check((std::string("bf16 plain ")+kind).c_str(),d,h,sh,x,st);backward(kind,d,h,x,st);}
 for(auto kind:{"mild","nodecay","same","beta2","strong","spikes","inf","beta01"}){auto d=make<bf>(2,4,128,128,{200,311,0,513},kind,5,true);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();std::vector<bf> bits;for(int part:{0,1,4,100}){sh.part=part;check((std::string("tensor ")+kind).c_str(),d,h,sh,x,st,&bits);}}
 {std::vector<index_t> l;for(int i=1;i<=200;i++)l.push_back(i);auto d=make<bf>(1,2,128,128,l,"mild",9,true);auto h=host(d,false);Dev<bf> x(d);check("lengths 1..200",d,h,x.shape(),x,st);}
 {auto d=make<bf>(1,1,128,128,{8192},"nodecay",11,false);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();std::vector<bf> bits;for(int part:{0,16,64,1000}){sh.part=part;check("8192 nodecay",d,h,sh,x,st,&bits);}}
 bench(16,32,{32768},{16,32,1<<24},st);bench(16,32,{8192,8192,8192,8192},{0,32},st);bench(16,32,{8192},{16,8},st);bench(2,8,{32768},{16},st);bench(16,32,{131072},{16,32},st);
 // repeatability
 {auto d=make<bf>(4,8,128,128,{3000,1000},"mild",13,true);auto h=host(d,false);Dev<bf> x(d);auto sh=x.shape();sh.part=4;std::vector<bf> bits;check("repeat",d,h,sh,x,st,&bits);int diff=0;for(int i=0;i<300;i++){x.fwd(sh,st);if(i%50==49){cudaDeviceSynchronize();auto o=x.o.read();diff+=memcmp(o.data(),bits.data(),o.size()*2)!=0;}}printf("repeat: %d of 6 differ\n",diff);}
}
