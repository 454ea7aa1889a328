/** All fleets: as wanted and as they are. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { fleetsQuery } from '../api/queries'
import { spares, standingOf } from '../model/fleets'
import { count } from '../model/format'
import { Empty, Shown, Status } from '../parts/Basics'

export default function FleetsPage() {
  useDocumentTitle('Fleets, Everstep')
  const query = useQuery(fleetsQuery)
  return (
    <div className="stack">
      <h1>Fleets</h1>
      <Shown query={query}>
        {(fleets) =>
          fleets.length ? (
            <section className="card scroll" style={{ padding: '4px 8px' }}>
              <table className="grid stacked">
                <thead>
                  <tr>
                    <th>Fleet</th>
                    <th>Status</th>
                    <th>Reason</th>
                    <th className="n">Connected / nodes / desired</th>
                    <th className="n">Spares wanted</th>
                    <th>Instance type</th>
                    <th>Zone</th>
                    <th className="n">Price now</th>
                  </tr>
                </thead>
                <tbody>
                  {fleets.map((fleet) => (
                    <tr key={fleet.FleetName}>
                      <td data-name="Fleet"><Link to={`/fleets/${encodeURIComponent(fleet.FleetName)}`}>{fleet.FleetName}</Link></td>
                      <td data-name="Status"><Status {...standingOf(fleet)} /></td>
                      <td className="reason">{fleet.Reason}{(fleet.Drift ?? []).length > 0 && ` ${fleet.Drift.length} differences from the contract.`}</td>
                      <td className="n" data-name="Connected / nodes / desired">{count(fleet.ConnectedNodeCount)} / {count(fleet.NodeCount)} / {count(fleet.DesiredNodeCount)}</td>
                      <td className="n" data-name="Spares wanted">{spares(fleet)}</td>
                      <td data-name="Instance type">{fleet.InstanceType || '–'}</td>
                      <td data-name="Zone">{fleet.AvailabilityZone || '–'}</td>
                      <td className="n" data-name="Price now">{fleet.PriceUsdPerHour === undefined ? 'not known' : `$${(fleet.PriceUsdPerHour * fleet.NodeCount).toFixed(2)}/h`}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </section>
          ) : (
            <Empty title="No fleet yet" command="everstep fleets create --name main --auto-scaling-group my-group">
              A fleet is an Auto Scaling group that Everstep looks after.
            </Empty>
          )
        }
      </Shown>
    </div>
  )
}
