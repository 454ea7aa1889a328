/** The list of all fleets: desired and actual numbers of nodes, and whether a fleet needs attention. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { fleetsQuery } from '../api/queries'
import type { Fleet } from '../contract'
import { fleetFigures, hook, shown } from '../model/figures'
import { fleetsVerdict, spares } from '../model/fleets'
import { sentence } from '../model/format'
import { Empty, Shown, Status, useIsStale } from '../parts/Basics'
import { Card } from '../parts/Card'
import { PageHead } from '../parts/PageHead'
import { FLEETS } from '../words/fleets'

const FIRST_FLEET = 'everstep fleets create --name main --auto-scaling-group my-group'

export default function FleetsPage() {
  useDocumentTitle('Fleets, Everstep')
  const query = useQuery(fleetsQuery)
  return (
    <div className="stack">
      <PageHead title={FLEETS.title} verdict={query.data?.length ? fleetsVerdict(query.data) : undefined} />
      <Shown query={query}>
        {(fleets) =>
          fleets.length ? (
            <FleetTable fleets={fleets} />
          ) : (
            <Empty title={FLEETS.empty.title} command={FIRST_FLEET}>
              {FLEETS.empty.text}
            </Empty>
          )
        }
      </Shown>
    </div>
  )
}

function FleetTable({ fleets }: { fleets: Fleet[] }) {
  const columns = FLEETS.columns
  return (
    <Card isFlush>
      <div className="scroll" tabIndex={0} role="region" aria-label={FLEETS.title}>
        <table className="grid stacked">
          <thead>
            <tr>
              <th>{columns.fleet}</th>
              <th>{columns.status}</th>
              <th>{columns.reason}</th>
              <th className="n">{columns.nodes}</th>
              <th className="n">{columns.spares}</th>
              <th>{columns.type}</th>
              <th>{columns.zone}</th>
              <th className="n">{columns.price}</th>
            </tr>
          </thead>
          <tbody>
            {fleets.map((fleet) => (
              <FleetRow key={fleet.FleetName} fleet={fleet} />
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  )
}

function FleetRow({ fleet }: { fleet: Fleet }) {
  const figures = fleetFigures(fleet, { isStale: useIsStale() })
  const columns = FLEETS.columns
  const figure = (field: 'connectedNodes' | 'nodes' | 'desiredNodes') => (
    <span {...hook(figures, field)}>{shown(figures, field)}</span>
  )
  const differences = fleet.Drift?.length ? ` ${FLEETS.differences(fleet.Drift.length)}` : ''
  const hasPrice = figures.priceUsdPerHour !== undefined
  const price = hasPrice ? FLEETS.perHour(shown(figures, 'priceUsdPerHour')) : FLEETS.unknown
  return (
    <tr>
      <td className="name" data-name={columns.fleet}>
        <Link to={`/fleets/${encodeURIComponent(fleet.FleetName)}`}>{fleet.FleetName}</Link>
      </td>
      <td data-name={columns.status} {...hook(figures, 'status')}>
        <Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} />
      </td>
      <td className="reason">
        {sentence(fleet.Reason ?? '')}
        {differences}
      </td>
      <td className="n" data-name={columns.nodes}>
        <span>
          {figure('connectedNodes')} / {figure('nodes')} / {figure('desiredNodes')}
        </span>
      </td>
      <td className="n" data-name={columns.spares}>
        {spares(fleet)}
      </td>
      <td className="nowrap" data-name={columns.type}>
        {fleet.InstanceType || '–'}
      </td>
      <td className="nowrap" data-name={columns.zone}>
        {fleet.AvailabilityZone || '–'}
      </td>
      <td className="n" data-name={columns.price} {...hook(figures, 'priceUsdPerHour')}>
        {price}
      </td>
    </tr>
  )
}
