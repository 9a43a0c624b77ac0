import csv,sys
rows=list(csv.reader(open(sys.argv[1]))); name=sys.argv[2]; lo=int(sys.argv[3]); 
cur=None;h=None;out=[];seen=0
for r in rows:
    if r and r[0]=='Kernel Name':
        if cur and name in cur and out: break
        cur=r[1]; continue
    if len(r)>1 and r[1]=='Source': h=r; continue
    if cur and name in cur and h and len(r)==len(h):
        d=dict(zip(h,r)); s=int(d['# Samples'] or 0); st=[(k[6:],int(v)) for k,v in d.items() if k.startswith('stall_') and 'Not' not in k and v not in('','0')]
        st.sort(key=lambda x:-x[1]); out.append((len(out),s,d['Source'].strip(),st[:2]))
for i,s,src,st in out:
    if s>=lo: print(i,s,src[:70],st)
print('total',sum(x[1] for x in out))
