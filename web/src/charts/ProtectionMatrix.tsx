/** Who holds what: shards down, nodes across, the thinnest protected first. */
import type { DescribeProtectionResponse } from '../contract'
import { bytes, count } from '../model/format'

const MOST_NODES = 64
const MOST_SHARDS = 256

export function ProtectionMatrix({ protection }: { protection: DescribeProtectionResponse }) {
  const inView = (shard: DescribeProtectionResponse['Shards'][number]) => shard.Holders.filter((holder) => holder.InView).length
  const shards = [...(protection.Shards ?? [])].sort((a, b) => inView(a) - inView(b) || a.CommittedStep - b.CommittedStep || a.Rank - b.Rank)
  const nodes = [...new Set(shards.toSorted((a, b) => a.Rank - b.Rank).flatMap((shard) => [shard.OwnerNodeId, ...shard.Holders.map((holder) => holder.NodeId)]))].slice(0, MOST_NODES)
  const newest = Math.max(...shards.map((shard) => shard.CommittedStep))
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label="Who holds which shard">
      <table className="matrix">
        <thead>
          <tr>
            <th scope="col">Rank</th>
            <th scope="col">Step</th>
            <th scope="col">Copies</th>
            {nodes.map((id) => (
              <th scope="col" key={id} className="mono" title={id}>
                …{id.slice(-5)}
              </th>
            ))}
            <th scope="col">Size</th>
            <th scope="col">Remark</th>
          </tr>
        </thead>
        <tbody>
          {shards.slice(0, MOST_SHARDS).map((shard) => (
            <tr key={shard.Rank}>
              <th scope="row">{shard.Rank}</th>
              <td>
                {shard.CommittedStep < 0 ? '–' : count(shard.CommittedStep)}
                {shard.CommittedStep < newest && <span className="dim"> −{count(newest - shard.CommittedStep)}</span>}
              </td>
              <td className={inView(shard) < protection.Copies ? 'out' : ''}>
                {inView(shard)}/{protection.Copies}
              </td>
              {nodes.map((id) => {
                const holder = shard.Holders.find((each) => each.NodeId === id)
                if (!holder) return <td key={id} />
                const kind = !holder.InView ? 'out' : id === shard.OwnerNodeId ? 'own' : 'copy'
                const what = { own: 'owner', copy: 'copy', out: 'out of view' }[kind]
                return (
                  <td key={id} className={kind} title={`${what}: rank ${shard.Rank} on ${id}`}>
                    {{ own: '●', copy: '✓', out: '!' }[kind]}
                    <span className="visually-hidden">{what}</span>
                  </td>
                )
              })}
              <td>{bytes(shard.Bytes)}</td>
              <td style={{ textAlign: 'left' }}>{shard.Reason}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <div className="keys">
        <span>● the owner’s own</span>
        <span>✓ copy that counts</span>
        <span>! out of view</span>
        {shards.length > MOST_SHARDS && <span>the {MOST_SHARDS} thinnest of {count(shards.length)} shards</span>}
      </div>
    </div>
  )
}
