/** All fleets: as wanted and as they are. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { fleetsQuery } from '../api/queries'
import { spares } from '../model/fleets'
import { fleetFigures, hook, shown } from '../model/figures'
import { Empty, Shown, Status, useStaleSeconds } from '../parts/Basics'

export default function FleetsPage() {
  useDocumentTitle('Fleets, Everstep')
  const query = useQuery(fleetsQuery)
  const staleSeconds = useStaleSeconds()
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
                  {fleets.map((fleet) => ({ fleet, figures: fleetFigures(fleet, { staleSeconds }) })).map(({ fleet, figures }) => (
                    <tr key={fleet.FleetName}>
                      <td data-name="Fleet"><Link to={`/fleets/${encodeURIComponent(fleet.FleetName)}`}>{fleet.FleetName}</Link></td>
                      <td data-name="Status" {...hook(figures, 'status')}><Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} /></td>
                      <td className="reason">{fleet.Reason}{(fleet.Drift ?? []).length > 0 && ` ${fleet.Drift.length} differences from the contract.`}</td>
                      <td className="n" data-name="Connected / nodes / desired"><span {...hook(figures, 'connectedNodes')}>{shown(figures, 'connectedNodes')}</span> / <span {...hook(figures, 'nodes')}>{shown(figures, 'nodes')}</span> / <span {...hook(figures, 'desiredNodes')}>{shown(figures, 'desiredNodes')}</span></td>
                      <td className="n" data-name="Spares wanted">{spares(fleet)}</td>
                      <td data-name="Instance type">{fleet.InstanceType || '–'}</td>
                      <td data-name="Zone">{fleet.AvailabilityZone || '–'}</td>
                      <td className="n" data-name="Price now" {...hook(figures, 'priceUsdPerHour')}>{figures.priceUsdPerHour === undefined ? 'not known' : `${shown(figures, 'priceUsdPerHour')}/h`}</td>
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
